"""The engine gives what a dense cache gives, however requests are served."""

import gc
import random
import threading
import weakref

import pytest

from kvjax import engine as engines
from kvjax import errors
from kvjax import request as requests
from kvjax import testing

CONFIG = testing.tiny_config()
GREEDY = requests.SamplingParams(max_tokens=12, ignore_eos=True)
Reason = requests.FinishReason


@pytest.fixture(scope="module")
def model():
  return testing.random_decoder(CONFIG, scan_layers=True)


@pytest.fixture(scope="module")
def prompts():
  """Three share 40 tokens, two of them 50; one is short, two are alone."""
  rng = random.Random(0)
  draw = lambda length: rng.choices(range(3, CONFIG.vocab_size), k=length)
  stem, branch = draw(40), draw(10)
  return [
    [*stem, *branch, *draw(9)],
    [*stem, *branch, *draw(3)],
    [*stem, *draw(20)],
    draw(5),
    draw(33),
    draw(34),
  ]


@pytest.fixture(scope="module")
def expected_long(prompts):
  """24 tokens after each prompt, by a dense cache, a token at a time."""
  dense = testing.DenseDecoder(testing.random_decoder(CONFIG), max_length=84)

  def greedy(prompt):
    dense.reset()
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 24:
      logits = dense.decode([tokens[dense.length]])
      if dense.length == len(tokens):
        tokens.append(int(logits[0].argmax()))
    return tuple(tokens[len(prompt) :])

  return [greedy(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(expected_long):
  return [tokens[:12] for tokens in expected_long]


def make_engine(model, **options):
  """An engine whose steps all tests share, unless they want other sizes."""
  defaults = {
    "num_pages": 64,
    "page_size": 8,
    "token_budget": 16,
    "max_sequences": 4,
  }
  return engines.Engine(model, **(defaults | options))


def outputs(completions):
  return [completion.tokens for completion in completions]


def check_whole(engine):
  assert engine.audit() == ()
  assert all(use.live == use.reserved == 0 for use in engine.cache.usage())
  assert engine.num_unfinished == 0


# Exactness. The real model's turn is in tests/system.


# Few sequences and rows a step: few shapes to compile, many chunks.
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"prefix_reuse": False},
    {"prefix_index": "hash_chain"},
    {"tail_policy": "full_pages"},
    {"page_size": 1, "num_pages": 512, "token_budget": 3, "max_sequences": 2},
    {"page_size": 16, "token_budget": 40, "max_sequences": 1},
    {"page_size": 128, "num_pages": 16, "token_budget": 5, "max_sequences": 3},
  ],
  ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_greedy_tokens_do_not_depend_on_the_cache(
  model, prompts, expected, options
):
  with make_engine(model, **options) as engine:
    assert outputs(engine.generate(prompts, GREEDY)) == expected
    again = engine.generate(prompts, GREEDY)
    assert outputs(again) == expected
    matched = [completion.matched_tokens for completion in again]
    if not options.get("prefix_reuse", True):
      assert not any(matched)
    elif options.get("tail_policy") == "full_pages":
      assert matched == [(len(prompt) - 1) // 8 * 8 for prompt in prompts]
    else:
      assert matched == [len(prompt) - 1 for prompt in prompts]
    assert engine.stats.compilations <= 16
    check_whole(engine)


def test_greedy_tokens_do_not_depend_on_arrivals(model, prompts, expected):
  rng = random.Random(1)
  with make_engine(model) as engine:
    submitted = {}
    left = set(range(len(prompts)))
    while left:
      index = rng.choice(sorted(left))
      left.remove(index)
      submitted[index] = engine.submit(prompts[index], GREEDY)
      for _ in range(rng.randrange(6)):
        engine.step()
    while engine.num_unfinished:
      engine.step()
    for index, request in submitted.items():
      assert request.completion().tokens == expected[index]
    check_whole(engine)


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_greedy_tokens_survive_pre_emption(
  model, prompts, expected_long, prefix_reuse
):
  # Two prompts of five pages are admitted, and each grows to eight.
  params = requests.SamplingParams(max_tokens=24, ignore_eos=True)
  with make_engine(
    model, num_pages=12, max_sequences=2, prefix_reuse=prefix_reuse
  ) as engine:
    order = [4, 5, 0, 3, 2, 1]
    completions = engine.generate([prompts[i] for i in order], params)
    assert outputs(completions) == [expected_long[i] for i in order]
    assert engine.stats.preemptions > 0
    check_whole(engine)


# Sampling.


def test_draws_depend_on_the_seed_and_not_on_the_batch(model, prompts):
  params = [
    requests.SamplingParams(
      max_tokens=10, temperature=1.3, top_k=40, top_p=0.95, seed=seed
    )
    for seed in range(6)
  ]
  with make_engine(model) as engine:
    together = outputs(engine.generate(prompts, params))
  with make_engine(model) as engine:
    alone = [
      engine.generate([prompt], own)[0].tokens
      for prompt, own in zip(prompts, params, strict=True)
    ]
    assert alone == together
    other = engine.generate(prompts[:1], params[1])[0].tokens
  assert other != together[0]


def test_requests_without_a_seed_take_it_from_the_engine(model, prompts):
  params = requests.SamplingParams(max_tokens=10, temperature=1.5)
  runs = []
  for seed in (0, 0, 1):
    with make_engine(model, seed=seed) as engine:
      runs.append(outputs(engine.generate([prompts[3]] * 2, params)))
  assert runs[0] == runs[1] != runs[2]
  assert runs[0][0] != runs[0][1]


def test_samples_are_forks_with_keys_of_their_own(model, prompts, expected):
  params = requests.SamplingParams(
    max_tokens=8, temperature=1.5, seed=4, n=4, ignore_eos=True
  )
  with make_engine(model) as engine:
    [completion] = engine.generate([prompts[2]], params)
    drawn = [output.tokens for output in completion.outputs]
    assert len(set(drawn)) == 4
    assert engine.stats.forked_tokens == 3 * (len(prompts[2]) - 1)
    [again] = engine.generate([prompts[2]], params)
    assert [output.tokens for output in again.outputs] == drawn
    greedy = requests.SamplingParams(max_tokens=12, n=3, ignore_eos=True)
    [completion] = engine.generate([prompts[2]], greedy)
    assert {output.tokens for output in completion.outputs} == {expected[2]}
    check_whole(engine)


# Ends: tokens, lengths, cancels.


class Letters:
  """One letter per token, so that stop strings span tokens."""

  eos_ids = ()

  def encode(self, text):
    return [ord(letter) - ord("!") for letter in text]

  def decode(self, ids):
    return "".join(chr(ord("!") + i) for i in ids)


def test_a_stop_token_ends_a_sample_and_is_its_last(model, prompts, expected):
  stop = expected[0][4]
  cut = expected[0].index(stop) + 1
  params = requests.SamplingParams(
    max_tokens=12, stop_token_ids=(stop,), ignore_eos=True
  )
  with make_engine(model) as engine:
    [completion] = engine.generate(prompts[:1], params)
  assert completion.tokens == expected[0][:cut]
  assert completion.finish_reason is Reason.STOP_TOKEN


def test_the_tokenizers_end_token_ends_a_sample(model, prompts, expected):
  class Ending(Letters):
    eos_ids = (expected[1][3],)

  cut = expected[1].index(Ending.eos_ids[0]) + 1
  with make_engine(model, tokenizer=Ending()) as engine:
    params = requests.SamplingParams(max_tokens=12)
    [completion] = engine.generate(prompts[1:2], params)
    assert completion.tokens == expected[1][:cut]
    assert completion.finish_reason is Reason.STOP_TOKEN
    # The token that ends a text is no part of it.
    assert completion.text == Letters().decode(expected[1][: cut - 1])
    [completion] = engine.generate(prompts[1:2], GREEDY)
    assert completion.tokens == expected[1]


def test_the_end_of_the_context_ends_a_sample(model, prompts, expected):
  with make_engine(model) as engine:
    engine._intake._max_length = 36
    [completion] = engine.generate(prompts[4:5], GREEDY)
    assert completion.finish_reason is Reason.LENGTH
    # 33 rows of prompt, three more: four tokens are drawn.
    assert completion.tokens == expected[4][:4]
    check_whole(engine)


def test_cancel_ends_a_request_where_it_stands(model, prompts, expected):
  with make_engine(model, max_sequences=2) as engine:
    running = engine.submit(prompts[0], GREEDY)
    other = engine.submit(prompts[3], GREEDY)
    waiting = engine.submit(prompts[4], GREEDY)
    while len(running.samples[0].tokens) < len(prompts[0]) + 3:
      engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    engine.cancel(running)  # ended: nothing more happens
    for request in (running, waiting):
      assert request.events[-1].finish_reason is Reason.CANCELLED
      assert request.events[-1].token is None
    while engine.num_unfinished:
      engine.step()
    assert running.completion().tokens == expected[0][:3]
    assert waiting.completion().tokens == ()
    assert other.completion().tokens == expected[3]
    check_whole(engine)


def during_step(engine, action):
  """Calls `action(program, *arguments)` in place of the engine's program."""
  program = engine._stepper._program

  class Replaced:
    compilations = 0

    def __call__(self, *arguments):
      return action(program, *arguments)

  engine._stepper._program = Replaced()
  return program


def test_a_cancel_inside_a_step_takes_effect_at_its_commit(model, prompts):
  with make_engine(model) as engine:
    request = engine.submit(prompts[0], GREEDY)

    def cancel_then_run(program, *arguments):
      engine.cancel(request)
      assert not request.is_finished
      return program(*arguments)

    during_step(engine, cancel_then_run)
    events = engine.step()
    assert [event.finish_reason for event in events] == [Reason.CANCELLED]
    check_whole(engine)


def test_a_step_inside_a_step_is_refused(model, prompts):
  with make_engine(model) as engine:
    engine.submit(prompts[0], GREEDY)
    during_step(engine, lambda program, *arguments: engine.step())
    with pytest.raises(errors.StepOpen, match="called the engine"):
      engine.step()
    during_step(engine, lambda program, *arguments: engine.close())
    with pytest.raises(errors.StepOpen, match="inside its step"):
      engine.step()
    assert engine.audit() == ()


def test_a_request_of_another_engine_is_not_cancelled(model, prompts):
  with make_engine(model) as engine, make_engine(model) as other:
    request = other.submit(prompts[0])
    with pytest.raises(errors.BadRequest, match="not of this engine"):
      engine.cancel(request)
    assert not request.is_finished


# Streams.


def test_a_stream_yields_every_token_as_it_comes(model, prompts, expected):
  with make_engine(model) as engine:
    first, second = (engine.submit(p, GREEDY) for p in prompts[:2])
    seen = []
    for event in engine.stream(first):
      assert event.request is first
      seen.append(event.token)
      assert first.num_events == len(seen)
    assert tuple(seen) == expected[0]
    assert event.finish_reason is Reason.LENGTH
    # The second ran along, and its events are still there.
    tokens = [event.token for event in engine.stream(second)]
    assert tuple(tokens) == expected[1]


def test_closing_a_stream_cancels_its_request(model, prompts):
  with make_engine(model) as engine:
    request = engine.submit(prompts[0], GREEDY)
    stream = engine.stream(request)
    next(stream)
    stream.close()
    assert request.samples[0].finish_reason is Reason.CANCELLED
    check_whole(engine)


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(
  model, prompts, expected
):
  letters = Letters()
  whole = letters.decode(expected[4])
  stop = whole[5:8]
  cut = whole.index(stop)
  params = requests.SamplingParams(max_tokens=12, stop=(stop,), ignore_eos=True)
  with make_engine(model, tokenizer=letters) as engine:
    request = engine.submit(letters.decode(prompts[4]), params)
    pieces = [event.text for event in engine.stream(request)]
    assert "".join(pieces) == request.completion().text == whole[:cut]
    assert request.completion().tokens == expected[4][: cut + 3]
    assert request.completion().finish_reason is Reason.STOP_STRING
    check_whole(engine)


def test_text_of_a_sample_is_its_tokens_decoded(model, prompts, expected):
  letters = Letters()
  with make_engine(model, tokenizer=letters) as engine:
    completions = engine.generate(prompts, GREEDY)
  assert [c.text for c in completions] == [letters.decode(t) for t in expected]


# Refusals.


@pytest.mark.parametrize(
  ("prompt", "params", "error", "message"),
  [
    ([], {}, errors.EmptyPrompt, "no tokens"),
    ([1, 97], {}, errors.TokenOutOfRange, "token id 97 at position 1"),
    ([1, -1], {}, errors.TokenOutOfRange, "token id -1"),
    ([1.5], {}, errors.TokenOutOfRange, "float"),
    ([[1, 2]], {}, errors.TokenOutOfRange, r"shape \(1, 2\)"),
    ([1] * 201, {}, errors.PromptTooLong, "201 tokens, the limit is 200"),
    ([1] * 100, {"max_tokens": 99}, errors.NeverFits, "max_tokens=99"),
    ("text", {}, errors.BadRequest, "tokenizer"),
    ([1], {"stop": ("x",)}, errors.BadRequest, "tokenizer"),
  ],
)
def test_bad_requests_are_refused_at_submit(
  model, prompt, params, error, message
):
  with make_engine(model, num_pages=16, max_length=200) as engine:
    before = engine.cache.allocator.state_digest()
    with pytest.raises(error, match=message):
      engine.submit(prompt, requests.SamplingParams(**params))
    with pytest.raises(error):
      engine.generate([[1, 2], prompt], requests.SamplingParams(**params))
    assert engine.cache.allocator.state_digest() == before
    check_whole(engine)


def test_generate_wants_a_list_of_prompts_and_as_many_params(model):
  with make_engine(model, tokenizer=Letters()) as engine:
    with pytest.raises(errors.BadRequest, match="str of 4"):
      engine.generate("text")
    with pytest.raises(errors.BadRequest, match="1 params for list of 2"):
      engine.generate(["a", "b"], [GREEDY])
    assert engine.num_unfinished == 0


def test_the_largest_request_that_fits_runs(model):
  params = requests.SamplingParams(max_tokens=13, ignore_eos=True)
  with make_engine(model) as engine:
    # 500 + 13 - 1 rows are all 64 pages of 8.
    [completion] = engine.generate([[1] * 500], params)
    assert len(completion.tokens) == 13
    assert engine.stats.peak_pages == 64
    check_whole(engine)


def test_a_closed_engine_refuses_everything(model, prompts):
  engine = make_engine(model)
  request = engine.submit(prompts[0])
  stream = engine.stream(engine.submit(prompts[1]))
  next(stream)
  engine.close()
  assert request.samples[0].finish_reason is Reason.CANCELLED
  check_whole(engine)
  for use in (
    engine.close,
    engine.step,
    engine.warm_up,
    lambda: engine.submit(prompts[0]),
    lambda: engine.cancel(request),
    lambda: engine.generate(prompts),
  ):
    with pytest.raises(errors.EngineClosed, match="closed"):
      use()
  assert [event.finish_reason for event in stream] == [Reason.CANCELLED]


# Failures.


def fail_before(program, *arguments):
  raise ArithmeticError("inside the model")


def fail_after(program, *arguments):
  program(*arguments)  # the pages are consumed
  raise ArithmeticError("on the device")


def fail_later(program, *arguments):
  """As a device does: the call returns, and its result cannot be read."""
  _, pages = program(*arguments)

  class Failed:
    def __array__(self, *args, **kwargs):
      raise ArithmeticError("on the device, later")

  return Failed(), pages


@pytest.mark.parametrize(
  ("failure", "error"),
  [
    (fail_before, ArithmeticError),
    (fail_after, errors.DeviceLost),
    (fail_later, errors.DeviceLost),
  ],
)
@pytest.mark.parametrize("steps", [0, 3, 9])
def test_a_failed_step_leaves_its_requests_to_be_tried_again(
  model, prompts, expected, failure, error, steps
):
  with make_engine(model) as engine:
    submitted = [engine.submit(prompt, GREEDY) for prompt in prompts]
    for _ in range(steps):
      engine.step()
    program = during_step(engine, failure)
    for _ in range(2):
      before = engine.cache.allocator.state_digest()
      with pytest.raises(error):
        engine.step()
      assert engine.audit() == ()
      if error is ArithmeticError and engine.stats.failed_steps == 2:
        assert engine.cache.allocator.state_digest() == before
    assert engine.stats.failed_steps == 2
    engine._stepper._program = program
    while engine.num_unfinished:
      engine.step()
    assert [r.completion().tokens for r in submitted] == expected
    check_whole(engine)


def test_generate_ends_its_requests_with_what_the_model_raised(model, prompts):
  with make_engine(model) as engine:
    during_step(engine, fail_before)
    waiting = engine.submit(prompts[0])
    with pytest.raises(ArithmeticError, match="inside the model"):
      engine.generate(prompts[1:], GREEDY)
    assert engine.audit() == ()
    assert not waiting.is_finished
    assert engine.num_unfinished == 1


class Refusing:
  """A plain object as a model, and one whose tracing fails."""

  config = CONFIG

  def __init__(self, model):
    self.cache_layout = model.cache_layout

  def __call__(self, pages, step):
    raise TypeError("no such operation")


def test_a_model_that_cannot_be_traced_leaves_the_cache_as_it_was(model):
  with make_engine(Refusing(model)) as engine:
    request = engine.submit([1, 2, 3])
    for _ in range(2):
      with pytest.raises(TypeError, match="no such operation"):
        engine.step()
      assert engine.audit() == ()
    with pytest.raises(TypeError, match="no such operation"):
      engine.warm_up()
    engine.cancel(request)
    check_whole(engine)


def test_what_the_cache_refuses_fails_only_its_own_request(
  model, prompts, expected
):
  with make_engine(model) as engine:
    namespaces = engine.cache.allocator.namespaces
    good = engine.submit(prompts[3], GREEDY)
    bad = engine.submit(prompts[0], GREEDY, namespace="gone")
    authorize = namespaces.authorize

    def refuse(namespace, **identity):
      if namespace == "gone":
        raise errors.NamespaceRevoked("namespace 'gone' is revoked")
      return authorize(namespace, **identity)

    namespaces.authorize = refuse
    with pytest.raises(errors.NamespaceRevoked, match="gone"):
      list(engine.stream(bad))
    assert bad.events[-1].finish_reason is Reason.ERROR
    assert tuple(e.token for e in engine.stream(good)) == expected[3]
    check_whole(engine)


# Counting.


def test_warm_up_compiles_all_there_is_to_compile(prompts, expected):
  calls = []
  own = testing.random_decoder(CONFIG, scan_layers=True)
  with make_engine(own) as engine:
    engine.warm_up(progress=lambda done, total: calls.append((done, total)))
    shapes = len(engine.cache.step_shapes)
    assert calls == [(i, shapes) for i in range(1, shapes + 1)]
    assert engine.stats.compilations == shapes <= 16
    for some in (prompts, prompts[:1], prompts[2:]):
      engine.generate(some, GREEDY)
    assert engine.stats.compilations == shapes
    compiled = engine._stepper._program._compiled
    assert compiled.run._cache_size() == compiled.traces == shapes
    assert outputs(engine.generate(prompts, GREEDY)) == expected
  with make_engine(own, prefix_reuse=False) as engine:
    engine.warm_up()
    assert engine.stats.compilations == 0  # shared with the first engine


def test_every_row_is_counted_once(model, prompts):
  with make_engine(model) as engine:
    params = requests.SamplingParams(max_tokens=5, n=2, ignore_eos=True)
    engine.generate(prompts, params)
    stats = engine.stats
    rows = sum(2 * (len(prompt) + 4) for prompt in prompts)
    assert (
      stats.matched_tokens + stats.forked_tokens + stats.computed_tokens
    ) == rows
    assert stats.generated_tokens == 5 * 2 * len(prompts)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.requests == len(stats.finished) == len(prompts)
    assert len(stats.pool) == stats.steps
    for use in stats.pool:
      assert use.live + use.evictable + use.free == 64
    assert stats.peak_pages == max(use.live for use in stats.pool)
    for times in stats.finished:
      assert 0 < times.first_token_seconds <= times.finish_seconds
      assert times.generated_tokens == 10


def test_finished_requests_are_not_kept(model, prompts):
  with make_engine(model) as engine:
    engine.generate([[1, 2, 3]] * 20, requests.SamplingParams(max_tokens=2))
    assert not engine._active
    assert engine._scheduler.num_waiting == 0
    assert not engine._scheduler._registry._followers


def test_a_finished_request_goes_without_the_cyclic_collector(model, prompts):
  with make_engine(model) as engine:
    gc.disable()
    try:
      request = engine.submit(prompts[0], GREEDY)
      for _ in engine.stream(request):
        pass
      cancelled = engine.submit(prompts[1], GREEDY)
      engine.cancel(cancelled)
      engine.generate([prompts[2]], GREEDY)  # sweeps out the cancelled one
      gone = [weakref.ref(request), weakref.ref(cancelled)]
      del request, cancelled, _
      assert [reference() for reference in gone] == [None, None]
    finally:
      gc.enable()


def test_requests_come_from_several_threads(model, prompts, expected):
  with make_engine(model) as engine:
    results = [None] * len(prompts)

    def serve(index):
      results[index] = engine.generate([prompts[index]], GREEDY)[0].tokens

    threads = [
      threading.Thread(target=serve, args=(i,)) for i in range(len(prompts))
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert results == expected
    check_whole(engine)
