"""Breaks an implementation on purpose, to prove that its tests would notice."""

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One fault, and the test that must fail because of it.

  Attributes:
    name: what is wrong.
    module: whose source is changed.
    function: the function of the module that callers find.
    old: the source that is replaced; occurs once.
    new: what replaces it.
    caught_by: calls a test of the conformance classes.
  """

  name: str
  module: types.ModuleType
  function: str
  old: str
  new: str
  caught_by: Callable[[Any], None]


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
  """The module's function is the mutant's while this lasts."""
  source = inspect.getsource(mutant.module)
  assert source.count(mutant.old) == 1, f"{mutant.name}: source has moved on"
  changed = types.ModuleType(mutant.module.__name__)
  exec(source.replace(mutant.old, mutant.new), changed.__dict__)
  broken = getattr(changed, mutant.function)
  with mock.patch.object(mutant.module, mutant.function, broken):
    yield
