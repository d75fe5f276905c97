"""The TPU kernels pass what every implementation passes, interpreted."""

import pytest

from tests.pallas_kernels import conformance
from tests.pallas_kernels import tpu_interpreter


@pytest.fixture(autouse=True)
def nothing_left_behind(capfd):
  """A copy that nobody waited for is printed when the kernel ends."""
  yield
  said = "".join(capfd.readouterr())
  assert "non-zero count" not in said
  assert "RACE" not in said


class TestAttention(conformance.AttentionConformance):
  implementation = tpu_interpreter.implementation("on_wait")


class TestMasks(conformance.MaskConformance):
  implementation = tpu_interpreter.implementation("eager")


class TestUpdate(conformance.UpdateConformance):
  implementation = tpu_interpreter.implementation("on_wait")


class TestUpdateEager(conformance.UpdateConformance):
  implementation = tpu_interpreter.implementation("eager")


class TestMerge(conformance.MergeConformance):
  implementation = tpu_interpreter.implementation("eager")
