"""Makes a package importable from its bare source.

The files of the package run unmodified.  What they import for a GPU, a server
or a logger is not there; each such module is replaced by one whose every name
is an empty class, unless a stand-in is given.
"""

import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any

StandIns = Mapping[str, Mapping[str, Any]]


class Anything:
  """Accepts whatever it is asked, for names that are never really used."""

  def __init__(self, *_: Any, **attributes: Any):
    self.__dict__.update(attributes)

  def __call__(self, *_: Any, **__: Any) -> None:
    return None

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return Anything()

  def __bool__(self) -> bool:
    return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Serves stand-ins, and packages whose `__init__` must not run.

  Everything else below those packages is found in their folders as usual.
  """

  def __init__(
    self,
    source: pathlib.Path,
    packages: str,
    stand_ins: StandIns,
  ):
    self._source = source
    self._packages = packages.split()
    self._stand_ins = stand_ins

  def find_spec(
    self, fullname: str, path: Any = None, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    if fullname not in self._stand_ins and fullname not in self._packages:
      return None
    spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
    folder = self._source.joinpath(*fullname.split("."))
    spec.submodule_search_locations = [str(folder)]
    return spec

  def exec_module(self, module: types.ModuleType) -> None:
    given = self._stand_ins.get(module.__name__, {})
    module.__dict__.update(given)
    if module.__name__ in self._stand_ins:
      module.__getattr__ = lambda name: _empty_class(name)


def _empty_class(name: str) -> type:
  if name.startswith("__"):
    raise AttributeError(name)
  return type(name, (Anything,), {})


def install(source: str, packages: str, stand_ins: StandIns) -> None:
  name = packages.split()[0]
  if name in sys.modules:
    return
  if not pathlib.Path(source, name).is_dir():
    raise FileNotFoundError(f"{source!r} holds no folder {name!r}")
  sys.meta_path.insert(0, _Finder(pathlib.Path(source), packages, stand_ins))
