"""The dense baseline is a sound decoder, so that it can be measured against."""

import numpy as np
import pytest

from kvjax import testing


def test_prefill_in_parts_and_decode_agree_with_one_prefill():
  decoder = testing.random_decoder()
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 97, (2, 9))
  whole = testing.DenseDecoder(decoder, batch=2, max_length=12)
  parts = testing.DenseDecoder(decoder, batch=2, max_length=12)
  expected = whole.prefill(tokens)
  parts.prefill(tokens[:, :8])
  np.testing.assert_allclose(parts.decode(tokens[:, 8]), expected, atol=1e-5)


def test_a_reset_cache_shows_nothing_of_earlier_sequences():
  dense = testing.DenseDecoder(testing.random_decoder(), max_length=24)
  first = dense.greedy([1, 2, 3], 6)
  dense.greedy([7, 8, 9], 20)
  assert dense.greedy([1, 2, 3], 6) == first


def test_greedy_ends_with_an_ending_token():
  dense = testing.DenseDecoder(testing.random_decoder(), max_length=24)
  tokens = dense.greedy([1, 2, 3], 6)
  end = tokens[2]
  ended = dense.greedy([1, 2, 3], 6, eos_ids=[end])
  assert ended == tokens[: tokens.index(end) + 1]


def test_more_rows_than_the_cache_has_are_refused():
  dense = testing.DenseDecoder(testing.random_decoder(), max_length=4)
  with pytest.raises(ValueError, match=r"end=5 rows, but self.max_length=4"):
    dense.prefill([[1, 2, 3, 4, 5]])


def test_scanned_layers_are_refused():
  decoder = testing.random_decoder(scan_layers=True)
  with pytest.raises(ValueError, match="takes unrolled layers"):
    testing.DenseDecoder(decoder, max_length=4)


def test_missing_data_skips_with_its_path(monkeypatch, tmp_path):
  monkeypatch.setenv("KVJAX_DATA", str(tmp_path))
  (tmp_path / "here.txt").touch()
  assert testing.data_path("here.txt") == tmp_path / "here.txt"
  with pytest.raises(pytest.skip.Exception, match=r"no data at .*gone\.txt"):
    testing.data_path("gone.txt")
