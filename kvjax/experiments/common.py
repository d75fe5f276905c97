"""What every experiment shares: the summary file, tables and fair timing."""

import dataclasses
import json
import math
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import jax
import numpy as np

SUMMARY_NAME = "summary.json"


class ExperimentError(Exception):
  """Something that a person must put right; the text says what.

  `kvjax.run` prints the text without a traceback and exits with status 2.
  """


@dataclasses.dataclass(frozen=True)
class Timing:
  """The wall times of one function, one entry for each round.

  Attributes:
    seconds: the times in the order of the rounds.
  """

  seconds: tuple[float, ...]

  @property
  def median(self) -> float:
    """The median time in seconds."""
    return statistics.median(self.seconds)

  @property
  def p99(self) -> float:
    """The 99th percentile in seconds."""
    return float(np.percentile(self.seconds, 99))


def interleave(
  functions: Mapping[str, Callable[[], object]],
  *,
  rounds: int,
  warm_ups: int = 1,
) -> dict[str, Timing]:
  """Times functions in turn, so that a slow minute of the machine hits all.

  Every round calls each function once, in an order of its own: what runs after
  a function finds the caches and the heap as that one left them.  A result that
  holds JAX arrays is waited for.

  Args:
    functions: the functions by name, each doing the whole work to be timed.
    rounds: how many times each function is timed.
    warm_ups: untimed calls of each function before the first round.

  Returns:
    One `Timing` for each name, with `rounds` entries.

  Raises:
    ValueError: if `rounds` is below one.
  """
  if rounds < 1:
    raise ValueError(f"{rounds=} must be at least 1")
  for function in functions.values():
    for _ in range(warm_ups):
      jax.block_until_ready(function())
  names = list(functions)
  seconds: dict[str, list[float]] = {name: [] for name in names}
  draw = random.Random(0)
  for _ in range(rounds):
    for name in draw.sample(names, len(names)):
      start = time.perf_counter()
      jax.block_until_ready(functions[name]())
      seconds[name].append(time.perf_counter() - start)
  return {name: Timing(tuple(times)) for name, times in seconds.items()}


def median_ratio(numerator: Timing, denominator: Timing) -> float:
  """Returns the median over rounds of numerator / denominator.

  Args:
    numerator: times of the function that is judged.
    denominator: times of the baseline, from the same `interleave`.

  Raises:
    ValueError: if the two were not timed for the same number of rounds.
  """
  if len(numerator.seconds) != len(denominator.seconds):
    raise ValueError(
      f"{len(numerator.seconds)} rounds against {len(denominator.seconds)}"
    )
  return statistics.median(
    above / below
    for above, below in zip(numerator.seconds, denominator.seconds, strict=True)
  )


def find_data(name: str) -> pathlib.Path:
  """Returns a file of the data that is not part of the repository.

  Args:
    name: the path below the data folder, which is `$KVJAX_DATA`, or
      `../shared/data` beside the repository where that is not set.

  Raises:
    ExperimentError: if there is no such file; the text says where it was
      looked for.
  """
  beside = pathlib.Path(__file__).parents[3] / "shared" / "data"
  path = pathlib.Path(os.environ.get("KVJAX_DATA") or beside) / name
  if not path.is_file():
    raise ExperimentError(
      f"no data at {str(path)!r}; set KVJAX_DATA to the folder that holds "
      f"{name}"
    )
  return path


def write_summary(
  workdir: pathlib.Path, summary: Mapping[str, object]
) -> dict[str, object]:
  """Writes `summary.json` and returns what it holds as plain Python values.

  Args:
    workdir: the folder; made when it is not there.
    summary: flat keys; NumPy and JAX scalars are converted, and a number that
      is not finite becomes None (JSON has no word for it).

  Returns:
    The dictionary as a reader of the file gets it.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  plain = {key: _plain(value) for key, value in summary.items()}
  text = json.dumps(plain, indent=2, allow_nan=False) + "\n"
  (workdir / SUMMARY_NAME).write_text(text, encoding="utf-8")
  return plain


def format_table(
  columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> str:
  """Returns a table as text: numbers to the right, words to the left.

  Args:
    columns: the headings.
    rows: as many cells each as there are headings; a float is shown with
      three or four significant figures, None as a dash.

  Examples:
    >>> print(format_table(["prompt", "tokens"], [["a", 12], ["bc", 3.14159]]))
    prompt  tokens
    a           12
    bc        3.14
  """
  cells = [[_cell(value) for value in row] for row in rows]
  widths = [
    max(len(heading), *(len(row[index]) for row in cells), 0)
    if cells
    else len(heading)
    for index, heading in enumerate(columns)
  ]
  is_number = [
    bool(rows) and all(_is_number(row[index]) for row in rows)
    for index in range(len(columns))
  ]

  def line(values: Sequence[str]) -> str:
    return "  ".join(
      value.rjust(width) if right else value.ljust(width)
      for value, width, right in zip(values, widths, is_number, strict=True)
    ).rstrip()

  return "\n".join([line(columns), *(line(row) for row in cells)])


def print_table(
  columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
  """Prints what `format_table` returns, for a person at a terminal."""
  print(format_table(columns, rows), flush=True)


def print_note(text: str) -> None:
  """Prints one line to stderr, where progress goes."""
  print(text, file=sys.stderr, flush=True)


def _is_number(value: object) -> bool:
  return value is None or isinstance(value, int | float | np.number)


def _cell(value: object) -> str:
  if value is None:
    return "-"
  if isinstance(value, bool | np.bool_):
    return "yes" if value else "no"
  if isinstance(value, int | np.integer):
    return f"{int(value):,}"
  if isinstance(value, float | np.floating):
    number = float(value)
    if number == 0 or not math.isfinite(number):
      return f"{number:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{decimals}f}"
  return str(value)


def _plain(value: object) -> object:
  if isinstance(value, jax.Array | np.ndarray | np.generic):
    return _plain(np.asarray(value).tolist())
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  if isinstance(value, pathlib.PurePath):
    return str(value)
  return value
