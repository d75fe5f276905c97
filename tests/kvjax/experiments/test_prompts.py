"""Prompt files, and the brute-force ideal of prefix reuse."""

import pytest

from kvjax.experiments import common
from kvjax.experiments import prompts


def test_a_text_file_holds_a_prompt_a_line_and_empty_lines_do_not_count(
  tmp_path,
):
  path = tmp_path / "mine.txt"
  path.write_text("one\n\n  two \n")
  assert prompts.read_prompts(path) == ["one", "  two "]


def test_a_prefix_file_beside_the_prompts_is_put_before_each(tmp_path):
  path = tmp_path / "mine.jsonl"
  path.write_text('{"prompt": "a\\nb"}\n{"prompt": "c"}\n')
  (tmp_path / "mine.prefix.txt").write_text("Shared.\n")
  assert prompts.read_prompts(path) == ["Shared.\na\nb", "Shared.\nc"]


@pytest.mark.parametrize(
  ("name", "content", "match"),
  [
    ("none.txt", None, "cannot read prompts"),
    ("empty.txt", "\n \n", "holds no prompt"),
    ("bad.jsonl", '{"prompt": "a"}\nnot json\n', "line 2: not a JSON object"),
    ("key.jsonl", '{"text": "a"}\n', "line 1: not a JSON object"),
    ("kind.jsonl", '{"prompt": 3}\n', "line 1: prompt=3 is not a text"),
  ],
)
def test_a_prompt_file_that_cannot_be_used_says_where_it_is_wrong(
  tmp_path, name, content, match
):
  path = tmp_path / name
  if content is not None:
    path.write_text(content)
  with pytest.raises(common.ExperimentError, match=match):
    prompts.read_prompts(path)


def test_the_ideal_is_the_longest_prefix_shared_with_any_earlier_prompt():
  served = [
    [7, 7, 7, 1],  # nothing before it
    [7, 7, 2, 2, 2],  # 2 with the first
    [7, 7, 2, 2, 3],  # 4 with the second
    [7, 7, 7, 1],  # all 4, less the one whose logits are wanted
    [8],  # nothing
    [7, 7, 7, 1, 5, 5],  # 4 with the first
  ]
  assert prompts.ideal_matched_tokens(served) == 0 + 2 + 4 + 3 + 0 + 4
