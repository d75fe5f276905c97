"""Checks the summary of the demo: `python .ci/check_summary.py FILE`."""

import json
import pathlib
import sys

# What must hold of each key; a key without a bound must only be a number.
_BOUNDS = {
  "requests": lambda value: value >= 8,
  "prompt_tokens": lambda value: value > 10_000,
  "matched_tokens": lambda value: value > 0,
  "computed_tokens": lambda value: value > 0,
  "generated_tokens": lambda value: value > 0,
  "peak_pages": lambda value: value > 0,
  "compilations": lambda value: 1 <= value <= 16,
  "outputs_equal_without_reuse": lambda value: value is True,
  "ttft_seconds_p50": lambda value: value > 0,
  "ttft_seconds_p50_without_reuse": lambda value: value > 0,
  "decode_tokens_per_second": lambda value: value > 0,
  "decode_ratio_vs_dense": lambda value: value > 0,
  "prefill_ratio_vs_dense": lambda value: value > 0,
  "reused_share_of_ideal": lambda value: 0.99 <= value <= 1,
  "audit_findings": lambda value: value == 0,
}


def main(path: str) -> int:
  """Prints what is wrong with the summary; returns the exit status."""
  summary = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  wrong = [
    f"{path}: {key} is {summary.get(key)!r}"
    for key, holds in _BOUNDS.items()
    if summary.get(key) is None or not holds(summary[key])
  ]
  folder = pathlib.Path(path).parent
  wrong += [
    f"{folder / name} is missing or empty"
    for name in ("generated.txt", "pool_use.png")
    if not (folder / name).is_file() or not (folder / name).stat().st_size
  ]
  print("\n".join(wrong) or f"{path} holds")
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
