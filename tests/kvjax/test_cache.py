"""The step protocol: all of a step happens, or none of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import errors

LAYOUT = kvjax.CacheLayout.uniform(
  num_layers=2, num_kv_heads=1, head_dim=4, page_size=4
)


def make_cache(**options) -> kvjax.KVCache:
  defaults = {"num_pages": 8, "max_sequences": 3, "max_tokens_per_step": 16}
  return kvjax.KVCache(LAYOUT, **(defaults | options))


@functools.partial(jax.jit, donate_argnums=0)
def model(pages, step):
  """Stores each token's id in every lane of its K row, minus it in V."""
  x = step.tokens.astype(jnp.float32)[:, None, None]
  x = jnp.broadcast_to(x, (step.num_tokens, 1, 4))
  for layer in range(2):
    out, pages = kvjax.attend(x, x, -x, pages, step, layer=layer)
  return out, pages


def run(cache, *batch):
  with cache.step(batch) as step:
    out, step.pages = model(step.pages, step.arrays)
  return out


def stored_tokens(cache, sequence):
  k, v = cache.gather(sequence, layer=1)
  np.testing.assert_array_equal(k, -v)
  return np.asarray(k)[:, 0, 0].astype(int).tolist()


def test_a_committed_step_is_visible():
  cache = make_cache()
  sequence = cache.open([11, 12, 13, 14, 15])
  run(cache, (sequence, 2))
  assert sequence.length == 2
  run(cache, (sequence, 3))
  assert stored_tokens(cache, sequence) == [11, 12, 13, 14, 15]
  assert cache.audit() == ()


def test_a_kept_batch_decodes_a_token_of_each_member():
  cache = make_cache()
  members = [cache.open([1, 2]), cache.open([5, 6, 7])]
  run(cache, (members[0], 2), (members[1], 3))
  batch = cache.batch(members)
  for tokens in ([3, 8], [4, 9]):
    cache.append(batch, tokens)
    with cache.step(batch) as step:
      _, step.pages = model(step.pages, step.arrays)
  assert stored_tokens(cache, members[0]) == [1, 2, 3, 4]
  assert stored_tokens(cache, members[1]) == [5, 6, 7, 8, 9]
  cache.close(members[0])
  with pytest.raises(errors.SequenceClosed):
    cache.append(batch, [1, 1])


@pytest.mark.parametrize("num_pages", [np.int64(8), np.array([8])], ids=repr)
def test_numpy_integers_are_as_good_as_ints_for_pools(num_pages):
  cache = make_cache(num_pages=num_pages)
  sequence = cache.open([1, 2, 3])
  run(cache, (sequence, 3))
  assert stored_tokens(cache, sequence) == [1, 2, 3]
  with pytest.raises(errors.LayoutError, match=r"num_pages=1\.5"):
    make_cache(num_pages=1.5)


def test_another_caches_sequence_is_refused_before_the_device_is_asked():
  cache, other = make_cache(), make_cache()
  run(cache, (cache.open([1, 2, 3]), 3))
  stranger = other.open([4, 5])
  before = cache.allocator.state_digest(), other.allocator.state_digest()
  with pytest.raises(errors.BadHandle, match="another allocator"):
    run(cache, (stranger, 2))
  assert before == (
    cache.allocator.state_digest(),
    other.allocator.state_digest(),
  )
  assert cache.audit() == other.audit() == ()


def test_a_commit_that_is_struck_half_way_leaves_an_empty_usable_cache():
  cache = make_cache()
  sequence = cache.open([1, 2, 3, 4, 5])

  def strike(phase):
    if phase == "commit.entering":
      cache.allocator.on_phase = None
      raise KeyboardInterrupt

  cache.allocator.on_phase = strike
  with pytest.raises(KeyboardInterrupt):
    run(cache, (sequence, 5))
  with pytest.raises(errors.DeviceLost):
    cache.close(sequence)
  assert cache.audit() == ()
  again = cache.open([1, 2, 3, 4, 5])
  assert again.matched_tokens == 0
  run(cache, (again, 5))
  assert stored_tokens(cache, again) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
  "make_batch",
  [
    lambda _: None,
    lambda _: 3,
    lambda _: [],
    lambda sequence: [sequence],
    lambda sequence: [(sequence, None)],
    lambda sequence: [(sequence, 1.5)],
    lambda sequence: [(sequence, -1)],
    lambda _: [(None, 1)],
  ],
)
def test_what_is_no_batch_opens_no_step(make_batch):
  cache = make_cache()
  sequence = cache.open([1, 2, 3])
  before = cache.allocator.state_digest()
  refused = pytest.raises((errors.BadStep, errors.BadHandle))
  with refused, cache.step(make_batch(sequence)):
    pass
  assert cache.allocator.open_plan is None
  assert cache.allocator.state_digest() == before
  run(cache, (sequence, 3))
  assert stored_tokens(cache, sequence) == [1, 2, 3]


def test_an_exception_before_the_model_restores_the_predecessor():
  cache = make_cache()
  sequence = cache.open([1, 2, 3, 4, 5])
  run(cache, (sequence, 3))
  before, usage = cache.allocator.state_digest(), cache.usage()
  with pytest.raises(KeyError), cache.step([(sequence, 2)]):
    raise KeyError("in the step")
  assert cache.allocator.state_digest() == before
  assert cache.usage() == usage
  assert cache.audit() == ()
  run(cache, (sequence, 2))
  assert stored_tokens(cache, sequence) == [1, 2, 3, 4, 5]


def test_an_exception_after_the_model_restores_the_predecessor():
  cache = make_cache()
  sequence = cache.open([1, 2, 3, 4, 5])
  run(cache, (sequence, 3))
  before = cache.allocator.state_digest()
  with pytest.raises(KeyError), cache.step([(sequence, 2)]) as step:
    _, step.pages = model(step.pages, step.arrays)
    raise KeyError("after the model")
  assert cache.allocator.state_digest() == before
  assert stored_tokens(cache, sequence) == [1, 2, 3]
  assert cache.audit() == ()


def test_a_commit_that_fails_restores_the_predecessor():
  cache = make_cache()
  sequence = cache.open([1, 2, 3, 4, 5])
  run(cache, (sequence, 3))
  before = cache.allocator.state_digest()

  def fail(phase):
    if phase.startswith("commit"):
      raise KeyError(phase)

  cache.allocator.on_phase = fail
  with pytest.raises(KeyError, match="commit"):
    run(cache, (sequence, 2))
  cache.allocator.on_phase = None
  assert cache.allocator.state_digest() == before
  assert cache.audit() == ()
  run(cache, (sequence, 2))
  assert stored_tokens(cache, sequence) == [1, 2, 3, 4, 5]


def test_an_aborted_row_copy_is_copied_again():
  cache = make_cache()
  parent = cache.open([1, 2, 3, 4, 5])
  run(cache, (parent, 5))
  child = cache.fork(parent)
  cache.append([child], [6])
  with pytest.raises(KeyError), cache.step([(child, 1)]):
    raise KeyError("in the step")
  run(cache, (child, 1))
  assert stored_tokens(cache, child) == [1, 2, 3, 4, 5, 6]
  assert stored_tokens(cache, parent) == [1, 2, 3, 4, 5]


def test_pages_donated_and_not_returned_empty_the_cache():
  cache = make_cache()
  sequence = cache.open([1, 2, 3])
  with (
    pytest.raises(errors.DeviceLost, match="donated"),
    cache.step([(sequence, 3)]) as step,
  ):
    model(step.pages, step.arrays)
  with pytest.raises(errors.DeviceLost):
    cache.append([sequence], [4])
  assert cache.audit() == ()
  again = cache.open([1, 2, 3])
  assert again.matched_tokens == 0
  run(cache, (again, 3))
  assert stored_tokens(cache, again) == [1, 2, 3]


def test_leaving_a_step_without_successor_pages_is_refused():
  cache = make_cache()
  sequence = cache.open([1, 2, 3])
  before = cache.allocator.state_digest()
  with (
    pytest.raises(errors.PagesNotReturned, match=r"without setting"),
    cache.step([(sequence, 3)]),
  ):
    pass
  assert cache.allocator.state_digest() == before
  with (
    pytest.raises(errors.PagesNotReturned, match="already held"),
    cache.step([(sequence, 3)]) as step,
  ):
    step.pages = step.pages
  with (
    pytest.raises(errors.PagesNotReturned, match="expected"),
    cache.step([(sequence, 3)]) as step,
  ):
    step.pages = jax.tree.map(lambda x: x[1:], step.pages)
  assert cache.allocator.state_digest() == before
  assert cache.audit() == ()


def test_one_step_is_open_at_a_time():
  cache = make_cache()
  first, second = cache.open([1, 2]), cache.open([3, 4])
  with cache.step([(first, 2)]) as step:
    with pytest.raises(errors.StepOpen), cache.step([(second, 2)]):
      pass
    with pytest.raises(errors.StepOpen):
      cache.gather(first, layer=0)
    with pytest.raises(errors.StepOpen):
      cache.idle_step(cache.step_shapes[0]).__enter__()
    _, step.pages = model(step.pages, step.arrays)
  run(cache, (second, 2))
  assert stored_tokens(cache, second) == [3, 4]


@pytest.mark.parametrize("change", ["fork", "truncate", "close"])
def test_a_member_of_an_open_step_is_not_changed(change):
  cache = make_cache()
  sequence = cache.open([1, 2])
  arguments = (sequence, 0) if change == "truncate" else (sequence,)
  with cache.step([(sequence, 2)]) as step:
    with pytest.raises(errors.SequenceInStep):
      getattr(cache, change)(*arguments)
    _, step.pages = model(step.pages, step.arrays)
  assert stored_tokens(cache, sequence) == [1, 2]


def test_a_cancel_inside_a_step_takes_effect_at_its_commit():
  cache = make_cache()
  sequence = cache.open([1, 2])
  with cache.step([(sequence, 2)]) as step:
    cache.cancel(sequence)
    _, step.pages = model(step.pages, step.arrays)
  assert not sequence.is_open
  assert cache.usage()[0].live == 0
  assert cache.audit() == ()


def test_a_step_that_does_not_fit_the_pool_changes_nothing():
  cache = make_cache(num_pages=3)
  first, second = cache.open(list(range(8))), cache.open(list(range(20, 28)))
  run(cache, (first, 8))
  before = cache.allocator.state_digest()
  with pytest.raises(errors.OutOfPages, match="needed=2"):
    run(cache, (second, 8))
  assert cache.allocator.state_digest() == before
  run(cache, (second, 4))
  assert second.length == 4


def test_a_step_larger_than_every_shape_changes_nothing():
  cache = make_cache(num_pages=16)
  sequence = cache.open(list(range(20)))
  before = cache.allocator.state_digest()
  with pytest.raises(errors.ShapeOverflow):
    run(cache, (sequence, 20))
  assert cache.allocator.state_digest() == before


def test_idle_steps_compile_every_shape_and_change_no_row():
  cache = make_cache()
  sequence = cache.open([1, 2, 3, 4, 5])
  run(cache, (sequence, 5))
  step_model = jax.jit(
    lambda pages, arrays: model.__wrapped__(pages, arrays), donate_argnums=0
  )
  for shape in cache.step_shapes:
    with cache.idle_step(shape) as step:
      _, step.pages = step_model(step.pages, step.arrays)
  assert step_model._cache_size() == len(cache.step_shapes) <= 16
  assert stored_tokens(cache, sequence) == [1, 2, 3, 4, 5]
  cache.append([sequence], [6])
  with cache.step([(sequence, 1)]) as step:
    _, step.pages = step_model(step.pages, step.arrays)
  assert step_model._cache_size() == len(cache.step_shapes)


def test_recycled_pages_never_show_their_former_rows():
  cache = make_cache(num_pages=3, max_length=12)
  for first in range(10, 60, 10):
    sequence = cache.open(list(range(first, first + 9)))
    run(cache, (sequence, 9))
    assert stored_tokens(cache, sequence) == list(range(first, first + 9))
    cache.close(sequence)
  assert cache.audit() == ()


def test_groups_with_unequal_page_sizes_are_written_together():
  layout = kvjax.CacheLayout(
    groups=(
      kvjax.CacheGroup(
        name="local", num_layers=2, num_kv_heads=1, head_dim=4, page_size=2
      ),
      kvjax.CacheGroup(
        name="global", num_layers=1, num_kv_heads=1, head_dim=4, page_size=4
      ),
    )
  )
  cache = kvjax.KVCache(
    layout, num_pages=(16, 8), max_sequences=2, max_tokens_per_step=16
  )

  @functools.partial(jax.jit, donate_argnums=0)
  def two_groups(pages, step):
    x = jnp.ones((1, 1, 4)) * step.tokens.astype(jnp.float32)[:, None, None]
    for group, layer in ((0, 0), (1, 0), (0, 1)):
      out, pages = kvjax.attend(x, x, -x, pages, step, layer=layer, group=group)
    return out, pages

  def advance(sequence, count):
    with cache.step([(sequence, count)]) as step:
      _, step.pages = two_groups(step.pages, step.arrays)

  first = cache.open([1, 2, 3, 4, 5, 6, 7])
  advance(first, 7)
  second = cache.open([1, 2, 3, 4, 5, 6, 70])
  assert second.matched_tokens == 6
  advance(second, 1)
  for group, layer in ((0, 0), (1, 0), (0, 1)):
    k, _ = cache.gather(second, layer=layer, group=group)
    assert k[:, 0, 0].astype(int).tolist() == [1, 2, 3, 4, 5, 6, 70]
  assert cache.audit() == ()
