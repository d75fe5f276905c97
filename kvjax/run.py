"""Runs one experiment: `python -m kvjax.run --config=FILE --workdir=DIR`.

Every value of the configuration can be overridden on the command line, as in
`--config.page_size=32`. What a person can put right (a misspelt name, a value
of the wrong kind, a file that is not there) is answered in a line or two on
stderr and with exit status 2.
"""

import difflib
import importlib
import pathlib
import re
import runpy
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NoReturn

import jax
import ml_collections
from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from host_allocator import errors
from kvjax import experiments
from kvjax.experiments import common

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The experiment, for example configs/quickstart.py."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where results go. Default: out/NAME of the experiment."
)
_COMPILED = flags.DEFINE_string(
  "compiled",
  "out/compiled",
  "Keeps compiled steps from one run to the next; empty keeps none.",
)

_OVERRIDE = re.compile(r"^--?(?:no)?config\.([^=]+)(?:=.*)?$", re.DOTALL)
_RUN = re.compile(r"^def run\(", re.MULTILINE)
_CONFIG_FILE = re.compile(r"^--?config(?:=(.*))?$")


class UsageError(Exception):
  """A command line that cannot be carried out; the text says why."""


def run_experiment(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> Mapping[str, object]:
  """Runs the experiment that `config.experiment` names.

  Args:
    config: the configuration; `config.experiment` is a module's name in
      `kvjax.experiments`.
    workdir: where results go; made when it is not there.

  Returns:
    The summary, as written to `workdir / "summary.json"`.

  Raises:
    UsageError: if there is no such experiment.
    ExperimentError: if the experiment lacks something that it needs.
    KVError: if a value of the configuration is refused by the library.
  """
  name = str(config.get("experiment", ""))
  names = experiment_names()
  if name not in names:
    raise UsageError(
      f"config.experiment={name!r} is not one of {', '.join(names)}."
      + did_you_mean(name, names)
    )
  workdir.mkdir(parents=True, exist_ok=True)
  module = importlib.import_module(f"{experiments.__name__}.{name}")
  return module.run(config, workdir)


def keep_compiled(folder: pathlib.Path) -> None:
  """Lets JAX write what it compiles to a folder of its version, and reuse it.

  A second engine, or a second run, then traces its step shapes but does not
  compile them.

  Args:
    folder: where; each JAX version has a folder of its own in it.
  """
  path = folder.absolute() / f"jax-{jax.__version__}"
  jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def experiment_names() -> tuple[str, ...]:
  """Returns the names that `config.experiment` may have, sorted."""
  folder = pathlib.Path(experiments.__file__).parent
  # Not imported to find out: some need what is not installed everywhere.
  return tuple(
    sorted(
      path.stem
      for path in folder.glob("*.py")
      if _RUN.search(path.read_text(encoding="utf-8"))
    )
  )


def did_you_mean(name: str, candidates: Sequence[str]) -> str:
  """Returns " Did you mean ...?" for the nearest candidate, or "".

  Args:
    name: what was written.
    candidates: what could have been meant.

  Examples:
    >>> did_you_mean("page_siz", ["page_size", "model"])
    " Did you mean 'page_size'?"
    >>> did_you_mean("xyz", ["page_size", "model"])
    ''
  """
  close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
  return f" Did you mean {close[0]!r}?" if close else ""


def check_overrides(argv: Sequence[str]) -> None:
  """Refuses a configuration that is not there and names that it lacks.

  Args:
    argv: the command line, the program's name first.

  Raises:
    UsageError: naming what is wrong and what may have been meant.
  """
  path = _config_path(argv)
  overrides = [m.group(1) for m in map(_OVERRIDE.match, argv) if m]
  if path is None:
    raise UsageError(
      "--config=FILE is needed, for example --config=configs/quickstart.py"
    )
  file, *arguments = path.split(":", 1)
  if not pathlib.Path(file).is_file():
    folder = pathlib.Path(file).parent
    there = sorted(str(found) for found in folder.glob("*.py"))
    raise UsageError(f"no file {file!r}." + did_you_mean(file, there))
  if not overrides:
    return
  names = _flat_names(runpy.run_path(file)["get_config"](*arguments))
  for override in overrides:
    if override not in names:
      raise UsageError(
        f"{file} has no value {override!r}."
        + did_you_mean(override, names)
        + f"\nIt has: {', '.join(names)}"
      )


def main(argv: Sequence[str]) -> None:
  """Runs the experiment of the command line; absl's entry point.

  Args:
    argv: what is left of the command line, the program's name first.
  """
  try:
    if len(argv) > 1:
      raise UsageError(
        f"what is {' '.join(argv[1:])!r}? Values go --name=value"
      )
    config = _CONFIG.value
    workdir = _WORKDIR.value or f"out/{config.get('experiment', 'run')}"
    if _COMPILED.value:
      keep_compiled(pathlib.Path(_COMPILED.value))
    summary = run_experiment(config, pathlib.Path(workdir))
    logging.debug("summary: %s", summary)
  except (UsageError, common.ExperimentError) as error:
    _exit(str(error))
  except errors.KVError as error:
    _exit(f"{error} [{error.reason}]")


def cli() -> None:
  """Parses the command line and runs `main`."""
  app.run(main, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
  asks_help = any(re.match(r"^--?help", argument) for argument in argv[1:])
  try:
    if not asks_help:
      check_overrides(argv[1:])
    return flags.FLAGS(argv)
  except (UsageError, flags.Error) as error:
    _exit(str(error))


def _exit(text: str) -> NoReturn:
  print(f"kvjax.run: {text}", file=sys.stderr)
  sys.exit(2)


def _config_path(argv: Sequence[str]) -> str | None:
  for index, argument in enumerate(argv):
    found = _CONFIG_FILE.match(argument)
    if found and found.group(1) is not None:
      return found.group(1)
    if found and index + 1 < len(argv):
      return argv[index + 1]
  return None


def _flat_names(config: ml_collections.ConfigDict) -> list[str]:
  names: list[str] = []
  for name, value in config.items():
    names.append(name)
    if isinstance(value, ml_collections.ConfigDict):
      names.extend(f"{name}.{inner}" for inner in _flat_names(value))
  return names


if __name__ == "__main__":
  cli()
