"""All operations in random order, against a model that shares no code."""

import collections
import inspect
import random

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from host_allocator import state as state_lib
from host_allocator.prefix import eviction as eviction_lib
from tests.host_allocator import view
from tests.host_allocator import world as worlds

NAMESPACES = ("", "tenant")
SALTS = ("", "salt")
FAULTS_OF_OPEN = ("open.matching", "open.matched")
FAULTS_OF_PLAN = (
  "plan.counted",
  "plan.evicted",
  "plan.reserving_0",
  "plan.reserved",
)
INDEXES = ("radix", "hash_chain")
PAGE_SIZES = [(1,), (4,), (3,), (2, 4), (4, 4), (2, 3)]
POLICIES = tuple(eviction_lib.POLICIES)
NUMBER = st.integers(0, 2**16)
IMAGES = st.tuples(st.integers(0, 9), st.integers(1, 4), st.sampled_from("xy"))
TOKENS = st.lists(st.integers(0, 2), max_size=10)


class Machine(stateful.RuleBasedStateMachine):
  """The same operations on one world for each index."""

  def __init__(self):
    super().__init__()
    self.worlds: list[worlds.World] = []
    self.prompts: list[list[int]] = []
    self.lost_index = False

  @stateful.initialize(
    page_sizes=st.sampled_from(PAGE_SIZES),
    pages=st.integers(5, 14),
    tail_policy=st.sampled_from(state_lib.TAIL_POLICIES),
    eviction=st.sampled_from(POLICIES),
    whole_edges=st.booleans(),
  )
  def build(self, page_sizes, pages, tail_policy, eviction, whole_edges):
    bundle = max(page_sizes)
    num_pages = tuple(pages * bundle // size for size in page_sizes)
    for index in INDEXES:
      config = view.Config(
        index, page_sizes, num_pages, tail_policy, eviction, whole_edges
      )
      self.worlds.append(worlds.World(config))

  def each(self, operate):
    """Runs an operation on every world."""
    return [operate(world) for world in self.worlds]

  def pick(self, world, number):
    return world.live[number % len(world.live)]

  def has_live(self):
    return all(world.live for world in self.worlds)

  def has_plan(self):
    return all(world.plan is not None for world in self.worlds)

  def can_step(self):
    return all(
      world.plan is None and worlds.unfinished(world) for world in self.worlds
    )

  def prompt(self, base, cut, suffix):
    """A new prompt that often begins like an earlier one."""
    prompt = list(suffix)
    if self.prompts and base % 8:
      known = self.prompts[base % len(self.prompts)]
      prompt = known[: len(known) - cut % (len(known) + 1)] + prompt
    prompt = prompt[: view.MAX_LENGTH - base % 3]
    self.prompts = [*self.prompts[-8:], prompt]
    return prompt

  @stateful.rule(
    base=NUMBER,
    cut=st.integers(0, 12),
    suffix=TOKENS,
    namespace=st.sampled_from(NAMESPACES),
    salt=st.sampled_from(SALTS),
    want_logits=st.booleans(),
    image=st.none() | IMAGES,
  )
  def open(self, base, cut, suffix, namespace, salt, want_logits, image):
    prompt = self.prompt(base, cut, suffix)
    answers = self.each(
      lambda world: world.open(
        prompt, namespace, salt, want_logits, image=image
      )
    )
    matches = [answer for answer in answers if isinstance(answer, tuple)]
    unit = self.worlds[0].layout.bundle_tokens
    for rows, contents in matches[1:]:
      if contents == matches[0][1]:
        self.worlds[0].count("equal residents")
        # Where two bundles begin alike, which is read decides what is pinned,
        # and that can decide whether the rest still fits.
        fewer, more = sorted((rows, matches[0][0]))
        assert fewer in (more, more // unit * unit)

  @stateful.precondition(lambda self: self.prompts)
  @stateful.rule(base=NUMBER, want_logits=st.booleans())
  def open_again(self, base, want_logits):
    """A whole prompt that has been there before, by default for logits."""
    prompt = self.prompts[base % len(self.prompts)]
    self.each(lambda world: world.open(prompt, "", "", want_logits))

  @stateful.rule(
    base=NUMBER,
    cut=st.integers(0, 12),
    suffix=TOKENS,
    fault=st.sampled_from(FAULTS_OF_OPEN),
  )
  def open_and_fail(self, base, cut, suffix, fault):
    prompt = self.prompt(base, cut, suffix)
    self.each(lambda world: world.open(prompt, "", "", True, fault))

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER)
  def rematch(self, number):
    self.each(lambda world: world.rematch(self.pick(world, number)))

  @stateful.precondition(has_live)
  @stateful.rule(
    number=NUMBER, token=st.integers(0, 2), width=st.integers(1, 3)
  )
  def append(self, number, token, width):
    def operate(world):
      members = world.live[number % len(world.live) :][:width]
      members = [live for live in members if not live.cancelled]
      if members:
        world.append(members, token)

    self.each(operate)

  @stateful.precondition(can_step)
  @stateful.rule(
    number=NUMBER, width=st.integers(1, 4), count=st.integers(1, 9)
  )
  def plan(self, number, width, count):
    self.each(
      lambda world: world.reserve(worlds.some_work(world, number, width, count))
    )

  @stateful.precondition(can_step)
  @stateful.rule(
    number=NUMBER,
    width=st.integers(1, 4),
    fault=st.sampled_from(FAULTS_OF_PLAN),
  )
  def plan_and_fail(self, number, width, fault):
    self.each(
      lambda world: world.reserve(
        worlds.some_work(world, number, width, 9), fault
      )
    )

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER, count=st.sampled_from((-1, 0, 30)))
  def plan_nonsense(self, number, count):
    self.each(lambda world: world.reserve([(self.pick(world, number), count)]))

  @stateful.precondition(has_plan)
  @stateful.rule()
  def commit(self):
    self.each(lambda world: world.commit())

  @stateful.precondition(can_step)
  @stateful.rule(number=NUMBER, count=st.sampled_from((1, 2, 5, 30, 30)))
  def compute(self, number, count):
    """A whole step of everybody who has rows left."""

    def operate(world):
      world.reserve(worlds.some_work(world, number, 8, count))
      world.commit()

    self.each(operate)

  @stateful.precondition(has_live)
  @stateful.rule(token=st.integers(0, 2), steps=st.integers(1, 5))
  def decode(self, token, steps):
    """A few tokens more for each sequence that has none waiting."""

    def operate(world):
      for step in range(steps if world.plan is None else 0):
        members = worlds.finished(world)
        if members:
          world.append(members, token + step)
          world.reserve([(live, 1) for live in members])
          world.commit()
          world.check()

    self.each(operate)

  @stateful.precondition(has_live)
  @stateful.rule(token=st.integers(0, 2), steps=st.integers(1, 5))
  def decode_kept(self, token, steps):
    """The same in a batch that is checked once and used again."""

    def operate(world):
      for step in range(steps):
        world.decode_kept(token + step)
        world.check()

    self.each(operate)

  @stateful.precondition(has_plan)
  @stateful.rule()
  def abort(self):
    self.each(lambda world: world.abort())

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER)
  def fork(self, number):
    self.each(lambda world: world.fork(self.pick(world, number)))

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER, length=st.integers(-1, view.MAX_LENGTH + 1))
  def truncate(self, number, length):
    self.each(lambda world: world.truncate(self.pick(world, number), length))

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER, back=st.integers(0, 6))
  def truncate_a_little(self, number, back):
    def operate(world):
      live = self.pick(world, number)
      world.truncate(live, max(len(live.tokens) - back, 0))

    self.each(operate)

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER)
  def close(self, number):
    self.each(lambda world: world.close(self.pick(world, number)))

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER)
  def cancel(self, number):
    self.each(lambda world: world.cancel(self.pick(world, number)))

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER)
  def lease(self, number):
    def operate(world):
      if len(world.leases) < 2:
        world.take_lease(self.pick(world, number))

    self.each(operate)

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER, back=st.integers(1, 4))
  def rewrite_under_a_lease(self, number, back):
    """Somebody reads a sequence that is cut and then goes on differently."""

    def operate(world):
      live = self.pick(world, number)
      free = world.plan is None and len(world.leases) < 2
      if free and len(live.tokens) > back:
        world.take_lease(live)
        world.truncate(live, len(live.tokens) - back)
        world.append([live], number % 3)
        world.reserve(worlds.all_work(live))
        world.commit()

    self.each(operate)

  @stateful.precondition(has_live)
  @stateful.rule(number=NUMBER, steps=st.integers(1, 6))
  def fork_and_decode_alike(self, number, steps):
    """Two forks compute equal rows side by side until they fill a bundle."""

    def operate(world):
      live = self.pick(world, number)
      if world.plan is not None or len(world.live) == view.MAX_SEQUENCES:
        return
      world.fork(live)
      twins = [live, world.live[-1]]
      for step in range(steps):
        if any(len(twin.tokens) == view.MAX_LENGTH for twin in twins):
          return
        world.append(twins[:1], step)
        world.append(twins[1:], step)
        world.reserve(
          [work for twin in twins for work in worlds.all_work(twin)]
        )
        world.commit()
        world.check()

    self.each(operate)

  @stateful.precondition(
    lambda self: all(world.leases for world in self.worlds)
  )
  @stateful.rule(number=NUMBER)
  def release(self, number):
    self.each(lambda world: world.release_lease(number))

  @stateful.rule(
    what=st.sampled_from(
      ("drop", "drop", "drop all", "revoke", "restore", "poison")
    ),
    chance=st.integers(0, 5),
  )
  def forget(self, what, chance):
    if chance != 3:
      return
    self.lost_index = True
    for world in self.worlds:
      if what == "drop":
        world.drop(NAMESPACES[1])
      elif what == "drop all":
        world.drop(None)
      elif what == "revoke":
        world.revoke(NAMESPACES[1])
      elif what == "restore":
        world.restore(NAMESPACES[1])
      else:
        world.poison()

  @stateful.invariant()
  def everything_holds(self):
    for world in self.worlds:
      world.check(lost_index=self.lost_index)
      world.check_receipts()
    self.lost_index = False


class TestMachine(Machine.TestCase):
  settings = hypothesis.settings(
    max_examples=200,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )


# How often each rule is taken in a long run.
WEIGHTS = {
  "open": 14,
  "open_again": 4,
  "open_and_fail": 2,
  "rematch": 4,
  "append": 4,
  "plan": 8,
  "plan_and_fail": 5,
  "plan_nonsense": 1,
  "commit": 10,
  "compute": 8,
  "decode": 5,
  "decode_kept": 5,
  "abort": 2,
  "fork": 7,
  "truncate": 2,
  "truncate_a_little": 6,
  "close": 8,
  "cancel": 3,
  "lease": 3,
  "release": 4,
  "rewrite_under_a_lease": 3,
  "fork_and_decode_alike": 3,
}


def take(machine, rule, draw):
  """Takes one rule of the machine with arguments from `draw`."""
  number = lambda: draw.randrange(2**16)
  count = lambda low, high: draw.randint(low, high)
  suffix = lambda: [draw.randrange(3) for _ in range(draw.choice((0, 1, 5, 9)))]
  arguments = {
    "number": number,
    "base": number,
    "cut": lambda: draw.choice((0, 0, 1, 2, 3, 6, 12)),
    "suffix": suffix,
    "image": lambda: draw.choice(
      (None, None, None, None, (count(0, 9), count(1, 4), draw.choice("xy")))
    ),
    "namespace": lambda: NAMESPACES[draw.random() < 0.1],
    "salt": lambda: SALTS[draw.random() < 0.1],
    "want_logits": lambda: draw.random() < 0.7,
    "fault": lambda: draw.choice(
      FAULTS_OF_OPEN if rule == "open_and_fail" else FAULTS_OF_PLAN
    ),
    "token": lambda: count(0, 2),
    "width": lambda: count(1, 4),
    "count": lambda: draw.choice(
      (-1, 0, 30) if rule == "plan_nonsense" else (1, 2, 3, 5, 9)
    ),
    "steps": lambda: count(1, 5),
    "length": lambda: count(-1, view.MAX_LENGTH + 1),
    "back": lambda: count(0, 6),
    "what": lambda: draw.choice(("drop", "drop all", "revoke", "poison")),
    "chance": lambda: 3,
  }
  function = getattr(type(machine), rule)
  names = inspect.signature(function).parameters
  function(machine, **{n: arguments[n]() for n in names if n != "self"})


def simulate(seed, episodes, steps):
  """Runs episodes of random operations; returns how many of each there were.

  Every operation is carried out on a world for each index and counted in both.
  """
  return sum(simulate_apart(seed, episodes, steps), collections.Counter())


def simulate_apart(seed, episodes, steps):
  """The same, counted for each world by itself."""
  tallies = [collections.Counter() for _ in INDEXES]
  for episode in range(episodes):
    draw = random.Random(f"{seed} {episode}")
    machine = Machine()
    machine.build(
      draw.choice(PAGE_SIZES),
      draw.randint(5, 16),
      draw.choice((*state_lib.TAIL_POLICIES, "copy_rows")),
      draw.choice(("lru", *POLICIES)),
      draw.random() < 0.2,
    )
    rules, weights = zip(*WEIGHTS.items(), strict=True)
    needs_plan, needs_work = {"commit", "abort"}, {"plan", "plan_and_fail"}
    for _ in range(steps):
      (rule,) = draw.choices(rules, weights)
      if draw.random() < 0.003:
        rule = "forget"
        if "tenant" in machine.worlds[0].closed_namespaces:
          for world in machine.worlds:
            world.restore("tenant")
      if rule in needs_plan and not machine.has_plan():
        continue
      if rule in needs_work | {"compute"} and not machine.can_step():
        continue
      if rule == "open_again" and not machine.prompts:
        continue
      if rule == "release" and not all(w.leases for w in machine.worlds):
        continue
      if not rule.startswith(("open", "forget")) and not machine.has_live():
        continue
      take(machine, rule, draw)
      machine.everything_holds()
    for tally, world in zip(tallies, machine.worlds, strict=True):
      tally.update(world.tally)
  return tallies


# What is counted beside the operations, for it must happen among them.
EVENTS = (
  "equal residents",
  "append under a lease",
  "dedupe",
  "copy",
  "evict",
  "abort after eviction",
  "truncate into a published page",
  "stale receipt",
)


def test_a_seeded_run_meets_every_kind_of_operation():
  tally = simulate(seed=5, episodes=10, steps=120)
  faults = (f"fault {phase}" for phase in (*FAULTS_OF_OPEN, *FAULTS_OF_PLAN))
  for kind in (*EVENTS, *faults, "append kept", "refused out_of_pages"):
    assert tally[kind], f"no {kind} in {tally}"


@pytest.mark.slow
def test_two_hundred_thousand_operations():
  run_operations(200_000)


def test_operations_are_counted_once_and_refusals_apart():
  accepted, refused, faults = run_operations(1, episodes=2, steps=60)
  (tally, _) = simulate_apart("long 1", 2, 60)
  kinds = {"open", "plan", "commit", "close", "append", "truncate", "fork"}
  assert kinds <= set(tally)
  assert accepted + refused + faults == sum(
    n for kind, n in tally.items() if kind not in EVENTS
  )
  assert min(accepted, refused, faults) > 0
  assert accepted < 2 * 60 * 10


def run_operations(least, *, episodes=20, steps=400):
  """Runs until one world has accepted so many operations.

  Returns:
    How many one world accepted, refused, and had to undo for a fault.
  """
  accepted = refused = faults = seed = 0
  while accepted < least:
    seed += 1
    tally, _ = simulate_apart(f"long {seed}", episodes, steps)
    for kind, count in tally.items():
      if kind.startswith("refused "):
        refused += count
      elif kind.startswith("fault "):
        faults += count
      elif kind not in EVENTS:
        accepted += count
  return accepted, refused, faults


def test_a_lease_taken_during_a_step_does_not_hide_its_rows():
  world = worlds.World(view.Config())
  world.open([0, 1, 2, 0], "", "", True)
  (live,) = world.live
  world.reserve([(live, 3)])
  world.commit()
  world.reserve([(live, 1)])
  world.take_lease(live)
  world.commit()
  world.check()


@pytest.mark.parametrize("index", INDEXES)
def test_a_duplicate_is_not_taken_from_another_bundle_that_begins_alike(index):
  """Forks fill one bundle each; one of the two is there already."""
  world = worlds.World(view.Config(index, (2, 3), (20, 14)))
  for tokens in ([0, 0, 1, 2, 0, 0], [0, 0, 1, 2]):
    world.open(tokens, "", "", True)
  known, live = world.live
  for member in (known, live):
    world.reserve(worlds.all_work(member))
    world.commit()
  world.fork(live)
  twins = [live, world.live[-1]]
  for token in (0, 1):
    world.append(twins[:1], token)
  for token in (0, 0):
    world.append(twins[1:], token)
  world.reserve([work for twin in twins for work in worlds.all_work(twin)])
  world.commit()
  world.check()
