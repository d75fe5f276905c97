"""Who finds what in both prefix indexes: roots, digests and tokens decide."""

import subprocess
import sys

import pytest

from host_allocator import errors

A = list(range(100, 120))


@pytest.mark.parametrize(
  ("mine", "theirs"),
  [
    ({"namespace": "a"}, {"namespace": "b"}),
    ({"adapter": "x"}, {"adapter": "y"}),
    ({"salt": "s"}, {"salt": "t"}),
    ({"adapter": "s"}, {"salt": "s"}),
    ({"namespace": "ab", "adapter": "c"}, {"namespace": "a", "adapter": "bc"}),
    ({"adapter": "ab", "salt": "c"}, {"adapter": "a", "salt": "bc"}),
    ({"namespace": "s"}, {"salt": "s"}),
  ],
)
def test_nobody_walks_anothers_root(indexed, mine, theirs):
  b = indexed()
  b.store(A, **mine)
  assert b.matched(A, **theirs) == 0
  assert b.matched(A, **mine) == 19


def test_a_revoked_namespace_is_refused_before_any_look_up(indexed):
  b = indexed()
  b.store(A, namespace="tenant")
  running = b.open([*A, 1], namespace="tenant")
  b.cache.revoke("tenant")
  b.cache.index.match = None  # A look-up would fail.
  with pytest.raises(errors.NamespaceRevoked, match="'tenant' is revoked"):
    b.cache.open(A, namespace="tenant")
  del b.cache.index.match
  b.decode(running, 2, 3, 4, 5)
  b.cache.close(running)
  b.cache.namespaces.restore("tenant")
  assert b.matched(A, namespace="tenant") == 0
  assert b.matched(A) == 0


def test_new_weights_end_sharing_while_old_requests_finish(indexed):
  b = indexed()
  old = b.open(A)
  b.cache.replace_model("new weights")
  new = b.open(A)
  assert new.matched_tokens == 0
  assert not set(new.pages().tolist()) & set(old.pages().tolist())
  b.decode(old, *range(9))
  b.cache.close(old)
  assert b.matched([*A, *range(9)]) == 20
  assert b.cache.usage()[0].live == 5


def test_dropping_an_index_frees_what_nobody_holds(indexed):
  b = indexed()
  b.store(A[:9])
  held = b.open(A)
  b.store([7] * 8, namespace="other")
  b.cache.drop_index("")
  assert b.cache.usage()[0].free == 32 - 5 - 2
  assert b.matched([7] * 8, namespace="other") == 7
  b.cache.drop_index()
  b.cache.close(held)
  assert b.cache.usage()[0].free == 32
  assert b.cache.audit() == ()


def test_a_forced_collision_costs_a_miss_and_no_wrong_row(bench):
  b = bench(prefix_index="hash_chain")
  b.cache.index._key_function = lambda *parts: b"always the same"
  b.store(A[:8])
  b.store([5] * 8)
  b.store([*A[:4], *[6] * 8])
  for prompt in (A[:8], [5] * 8, [*A[:4], *[6] * 8], [9] * 8):
    b.open(prompt)
  b.device.check_all()


@pytest.mark.parametrize("depth", [0, 4, 12])
def test_other_tokens_under_the_same_digest_and_parent_are_no_hit(
  indexed, depth
):
  """A digest that says nothing of the tokens leaves them to decide (R8)."""
  b = indexed(tail_policy="full_pages")
  b.cache.index._key_function = lambda parent, tokens, extras: parent + b"x"
  b.store(A)
  assert b.matched([*A[:depth], 9, 9, 9, 9, 1]) == depth
  assert b.matched([*A[:depth], 9, 9, 9, 9, *A[depth + 4 :], 1]) == depth
  assert b.matched([*A, 1]) == 20


def test_equal_tokens_under_another_ancestor_are_no_hit(indexed):
  b = indexed(tail_policy="full_pages")
  b.store([1, 1, 1, 1, *A[:8]])
  assert b.matched([2, 2, 2, 2, *A[:8]]) == 0


def test_keys_are_equal_in_processes_with_different_hash_seeds():
  program = (
    "from host_allocator import identity as i;"
    "print(i.page_key(i.page_key(b'', b'abcd', ('x', 's')), b'efgh').hex())"
  )
  found = {
    subprocess.run(
      [sys.executable, "-c", program],
      env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
      capture_output=True,
      check=True,
      text=True,
    ).stdout
    for seed in ("1", "2")
  }
  assert len(found) == 1
