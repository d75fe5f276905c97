"""The README's examples run, print what they say, and its links lead there."""

import pathlib
import re

import pytest

from kvjax import models

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
  r"^```python\n(.*?)^```\n(?:\n```output\n(.*?)^```)?",
  TEXT,
  re.DOTALL | re.MULTILINE,
)


def run_examples(examples, capsys) -> str:
  scope: dict[str, object] = {}
  for code, _ in examples:
    exec(compile(code, "README.md", "exec"), scope)
  return capsys.readouterr().out


def test_the_ten_lines_print_what_the_readme_says(capsys):
  own_model = [pair for pair in EXAMPLES if "smollm2" not in pair[0]]
  wanted = "".join(output for _, output in own_model)
  assert wanted
  assert run_examples(own_model, capsys) == wanted


def test_the_server_example_answers(capsys):
  try:
    models.smollm2_gguf()
  except models.CheckpointError as error:
    pytest.skip(str(error))
  assert "Paris" in run_examples(EXAMPLES, capsys)


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)", TEXT))
def test_a_link_leads_to_a_file(target):
  assert (ROOT / target).exists()


def test_every_make_target_that_is_named_exists():
  # In code only: prose, too, makes things.
  targets = set(
    re.findall(r"(?:^ +|`)make ([a-z]+(?:-[a-z]+)*)", TEXT, re.MULTILINE)
  )
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  assert {"demo", "test"} <= targets
  assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
