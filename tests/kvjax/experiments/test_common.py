"""The helpers that every experiment shares."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.experiments import common


def test_every_round_times_every_function_in_an_order_of_its_own():
  calls = []
  timings = common.interleave(
    {name: (lambda name=name: calls.append(name)) for name in "abc"},
    rounds=30,
    warm_ups=1,
  )
  assert calls[:3] == list("abc")
  rounds = ["".join(calls[at : at + 3]) for at in range(3, len(calls), 3)]
  assert {"".join(sorted(each)) for each in rounds} == {"abc"}
  pairs = {each[at : at + 2] for each in rounds for at in (0, 1)}
  assert pairs == {"ab", "ac", "ba", "bc", "ca", "cb"}
  assert all(len(timing.seconds) == 30 for timing in timings.values())


def test_a_ratio_is_the_median_of_the_paired_ratios():
  slow = common.Timing((2.0, 30.0, 4.0))
  fast = common.Timing((1.0, 10.0, 1.0))
  assert common.median_ratio(slow, fast) == 3.0
  assert slow.median == 4.0


def test_no_rounds_and_unpaired_rounds_are_refused():
  with pytest.raises(ValueError, match="rounds=0"):
    common.interleave({"a": lambda: None}, rounds=0)
  with pytest.raises(ValueError, match="1 rounds against 2"):
    common.median_ratio(common.Timing((1.0,)), common.Timing((1.0, 2.0)))


def test_a_summary_reads_back_as_plain_json_values(tmp_path):
  folder = tmp_path / "new"
  written = common.write_summary(
    folder,
    {
      "count": np.int64(3),
      "share": jnp.float32(0.5),
      "missing": float("nan"),
      "by_group": (1, np.float32(2.0)),
      "equal": np.bool_(True),
    },
  )
  assert json.loads((folder / "summary.json").read_text()) == written
  assert written == {
    "count": 3,
    "share": 0.5,
    "missing": None,
    "by_group": [1, 2.0],
    "equal": True,
  }


def test_a_table_lines_numbers_up_to_the_right():
  text = common.format_table(
    ["name", "count", "share"],
    [["long name", 1_234, 0.98765], ["b", None, 12.0]],
  )
  assert text.splitlines() == [
    "name       count  share",
    "long name  1,234  0.988",
    "b              -   12.0",
  ]
