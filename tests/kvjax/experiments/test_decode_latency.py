"""The decode latency experiment verifies before it times."""

import json
from unittest import mock

import jax
import ml_collections
import numpy as np
import pytest

from configs import decode_latency as config_file
from kvjax.experiments import common
from kvjax.experiments import decode_latency


def _config(**changes) -> ml_collections.ConfigDict:
  config = config_file.get_config()
  config.update(
    {
      "sequences": 3,
      "q_heads": 4,
      "context": 90,
      "shortest": 7,
      "prefill_rows": 20,
      "rounds": 2,
      "implementations": ("reference",),
    }
  )
  config.update(changes)
  return config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_writes_every_ratio_and_the_error(tmp_path, dtype):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    summary = decode_latency.run(_config(dtype=dtype), tmp_path)
  written = json.loads((tmp_path / "summary.json").read_text())
  assert written == summary
  for key in (
    "decode_ratio_vs_jax_attention",
    "decode_ratio_vs_best_dense",
    "ragged_decode_ratio_vs_jax_attention",
    "prefill_ratio_vs_dense",
    "share_of_stream_read",
  ):
    assert summary[key] > 0
  assert 0 < summary["max_relative_error"] <= decode_latency.TOLERANCE[dtype]
  assert summary["jax_version"] == jax.__version__


def test_a_wrong_answer_is_never_timed(tmp_path):
  def off(rows, config):
    q = decode_latency.paged_operands(rows, config.page_size)["q"]
    return {decode_latency.DEFAULT: lambda: q}

  with (
    mock.patch.object(decode_latency, "paged_functions", off),
    mock.patch.object(common, "interleave") as timed,
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
    pytest.raises(common.ExperimentError, match="pages is wrong"),
  ):
    decode_latency.run(_config(), tmp_path)
  timed.assert_not_called()


def test_nan_is_an_infinite_error():
  rows = decode_latency.make_shapes(_config())["decode"]
  nan = np.full(rows.q.shape, np.nan)
  assert decode_latency.relative_error(rows, lambda: nan) == np.inf


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"dtype": "float16"}, "dtype='float16', expected one of float32"),
    ({"shortest": 91}, "shortest=91, expected 1 to context=90"),
    ({"prefill_rows": 0}, "prefill_rows=0, expected 1 to context=90"),
  ],
)
def test_values_that_make_no_sense_are_named(changes, text):
  with pytest.raises(common.ExperimentError, match=text):
    decode_latency.make_shapes(_config(**changes))
