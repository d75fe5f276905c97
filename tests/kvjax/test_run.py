"""The command line: overrides, and answers to what a person gets wrong."""

import pathlib
import subprocess
import sys
import types

import ml_collections
import pytest

from kvjax import errors
from kvjax import run
from kvjax.experiments import common

CONFIG = """
import ml_collections

def get_config(argument=""):
  return ml_collections.ConfigDict({
    "experiment": "quickstart",
    "page_size": 16,
    "inner": {"share": 0.5},
    "argument": argument,
  })
"""


@pytest.fixture
def config_file(tmp_path: pathlib.Path) -> str:
  path = tmp_path / "mine.py"
  path.write_text(CONFIG)
  return str(path)


def test_a_misspelt_value_is_answered_without_a_traceback(config_file):
  ended = subprocess.run(
    [
      sys.executable,
      "-m",
      "kvjax.run",
      f"--config={config_file}",
      "--config.page_siz=32",
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert ended.returncode == 2
  assert "Did you mean 'page_size'?" in ended.stderr
  assert "Traceback" not in ended.stderr
  assert not ended.stdout


def test_known_overrides_pass_in_every_spelling(config_file):
  run.check_overrides(
    [
      f"--config={config_file}:x",
      "--config.page_size=3",
      "--config.inner.share",
      "0.25",
      "-config.argument=a=b",
    ]
  )


@pytest.mark.parametrize(
  ("arguments", "match"),
  [
    (["--workdir=x"], r"--config=FILE is needed"),
    (["--config={folder}/min.py"], r"no file .*Did you mean '.*mine.py'"),
    (["--config={file}", "--config.inner.shar=1"], r"mean 'inner.share'"),
    (["--config", "{file}", "--noconfig.argumen"], r"mean 'argument'"),
    (["--config={file}", "--config.zzz=1"], r"has no value 'zzz'\.\nIt has"),
  ],
)
def test_what_cannot_be_meant_is_refused(config_file, arguments, match):
  folder = str(pathlib.Path(config_file).parent)
  argv = [each.format(file=config_file, folder=folder) for each in arguments]
  with pytest.raises(run.UsageError, match=match):
    run.check_overrides(argv)


def test_an_unknown_experiment_names_the_nearest(tmp_path):
  config = ml_collections.ConfigDict({"experiment": "quikstart"})
  with pytest.raises(run.UsageError, match="Did you mean 'quickstart'"):
    run.run_experiment(config, tmp_path)


def test_an_experiment_gets_its_config_and_an_existing_folder(
  tmp_path, monkeypatch
):
  seen = {}

  def fake(config, workdir):
    seen.update(page_size=config.page_size, there=workdir.is_dir())
    return {"requests": 1}

  module = types.SimpleNamespace(run=fake)
  monkeypatch.setattr(run.importlib, "import_module", lambda name: module)
  config = ml_collections.ConfigDict(
    {"experiment": "quickstart", "page_size": 4}
  )
  assert run.run_experiment(config, tmp_path / "a" / "b") == {"requests": 1}
  assert seen == {"page_size": 4, "there": True}


@pytest.mark.parametrize(
  ("error", "text"),
  [
    (common.ExperimentError("no data here"), "kvjax.run: no data here\n"),
    (errors.EmptyPrompt("none"), "kvjax.run: none [empty_prompt]\n"),
    (run.UsageError("what?"), "kvjax.run: what?\n"),
  ],
)
def test_what_a_person_can_put_right_ends_with_status_2(
  error, text, capsys, monkeypatch, tmp_path
):
  def refuse(config, workdir):
    raise error

  config = ml_collections.ConfigDict({"experiment": "quickstart"})
  flag = types.SimpleNamespace
  monkeypatch.setattr(run, "run_experiment", refuse)
  monkeypatch.setattr(run, "_CONFIG", flag(value=config))
  monkeypatch.setattr(run, "_WORKDIR", flag(value=str(tmp_path)))
  monkeypatch.setattr(run, "_COMPILED", flag(value=""))
  with pytest.raises(SystemExit) as ended:
    run.main(["kvjax.run"])
  assert ended.value.code == 2
  assert capsys.readouterr().err == text


def test_words_without_dashes_are_questioned(capsys):
  with pytest.raises(SystemExit) as ended:
    run.main(["kvjax.run", "page_size=3"])
  assert ended.value.code == 2
  assert "'page_size=3'" in capsys.readouterr().err
