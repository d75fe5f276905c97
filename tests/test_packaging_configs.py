"""Every file in configs/ can be run as its docstring says."""

import pathlib
import runpy

import pytest

from kvjax import run

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def test_there_is_a_config_for_every_experiment():
  named = {
    runpy.run_path(str(path))["get_config"]().experiment for path in CONFIGS
  }
  assert named == set(run.experiment_names())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_names_its_experiment_and_its_command(path):
  module = runpy.run_path(str(path))
  config = module["get_config"]()
  assert config.experiment in run.experiment_names()
  command = f"python -m kvjax.run --config=configs/{path.name}"
  assert command in (module["__doc__"] or "")
