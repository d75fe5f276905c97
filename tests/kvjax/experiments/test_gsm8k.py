"""The few-shot prompts of GSM8K."""

import json

import pytest

from kvjax.experiments import common
from kvjax.experiments import gsm8k


def write_rows(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.fixture
def files(tmp_path):
  rows = [
    {"question": f"q{n}\u2028?", "answer": f"a{n}\n#### {n}"} for n in range(4)
  ]
  return (
    write_rows(tmp_path / "train.jsonl", rows[:2]),
    write_rows(tmp_path / "test.jsonl", rows[2:]),
  )


def test_every_question_follows_the_same_worked_examples(files):
  first, second = gsm8k.few_shot_prompts(*files, shots=2, questions=2)
  before = (
    "Question: q0\u2028?\nAnswer: a0\n#### 0\n\n"
    "Question: q1\u2028?\nAnswer: a1\n#### 1\n\n"
  )
  assert first == before + "Question: q2\u2028?\nAnswer:"
  assert second == before + "Question: q3\u2028?\nAnswer:"


def test_too_few_lines_and_lines_of_another_kind_are_refused(files, tmp_path):
  train, test = files
  with pytest.raises(common.ExperimentError, match="holds 2 lines, 3 are"):
    gsm8k.few_shot_prompts(train, test, shots=2, questions=3)
  with pytest.raises(common.ExperimentError, match="nothing to ask"):
    gsm8k.few_shot_prompts(train, test, shots=2, questions=0)
  other = write_rows(tmp_path / "other.jsonl", [{"question": "q"}])
  with pytest.raises(common.ExperimentError, match='line 1: no "question"'):
    gsm8k.few_shot_prompts(train, other, shots=2, questions=1)


def test_data_that_is_not_there_says_where_it_was_looked_for(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("KVJAX_DATA", str(tmp_path))
  with pytest.raises(common.ExperimentError, match="set KVJAX_DATA to the"):
    common.find_data("gsm8k/test.jsonl")
  (tmp_path / "gsm8k").mkdir()
  (tmp_path / "gsm8k" / "test.jsonl").write_text("{}")
  found = common.find_data("gsm8k/test.jsonl")
  assert found == tmp_path / "gsm8k" / "test.jsonl"
