"""Prompts from files, and the reuse that an infinite cache would give them."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from kvjax.experiments import common


def read_prompts(path: pathlib.Path) -> list[str]:
  """Reads prompts and puts the prefix file's text, if any, before each.

  Args:
    path: NAME.jsonl holds JSON objects with a "prompt", one a line; any other
      file holds a prompt a line. Empty lines are left out. Where there is a
      file NAME.prefix.txt beside it, every prompt begins with its text.

  Returns:
    The prompts in the order of the file.

  Raises:
    ExperimentError: if the file is not there, holds no prompt, or a line of
      it is not what the file's name says.
  """
  try:
    lines = path.read_text(encoding="utf-8").split("\n")
  except (OSError, UnicodeDecodeError) as error:
    raise common.ExperimentError(
      f"cannot read prompts from {str(path)!r}: {error}"
    ) from error
  numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
  if not numbered:
    raise common.ExperimentError(f"{str(path)!r} holds no prompt")
  if path.suffix == ".jsonl":
    texts = [_json_prompt(path, number, line) for number, line in numbered]
  else:
    texts = [line for _, line in numbered]
  prefix = path.with_name(path.stem + ".prefix.txt")
  before = prefix.read_text(encoding="utf-8") if prefix.is_file() else ""
  return [before + text for text in texts]


def ideal_matched_tokens(prompts: Sequence[Sequence[int]]) -> int:
  """Counts the tokens that an infinite cache could spare, by brute force.

  An infinite cache keeps every row that an earlier prompt of the list
  computed, to the single token. So a prompt is spared its longest common
  prefix with any earlier one, at most all of its tokens but the last (whose
  logits are wanted). Generated tokens are not counted on either side.

  Args:
    prompts: token ids, in the order in which they are served.

  Returns:
    The sum over the prompts.

  Examples:
    >>> ideal_matched_tokens([[1, 2, 3], [1, 2, 4], [1, 2, 4]])
    4
  """
  total = 0
  for index, prompt in enumerate(prompts):
    longest = max(
      (_common_prefix(prompt, earlier) for earlier in prompts[:index]),
      default=0,
    )
    total += min(longest, len(prompt) - 1)
  return total


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
  length = min(len(first), len(second))
  differs = np.asarray(first[:length]) != np.asarray(second[:length])
  return int(np.argmax(differs)) if differs.any() else length


def _json_prompt(path: pathlib.Path, number: int, line: str) -> str:
  try:
    prompt = json.loads(line)["prompt"]
  except (json.JSONDecodeError, KeyError, TypeError) as error:
    raise common.ExperimentError(
      f'{str(path)!r} line {number}: not a JSON object with a "prompt"'
    ) from error
  if not isinstance(prompt, str) or not prompt:
    raise common.ExperimentError(
      f"{str(path)!r} line {number}: {prompt=} is not a text"
    )
  return prompt
