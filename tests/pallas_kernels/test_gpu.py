"""The GPU kernels pass what every implementation passes, interpreted."""

import pytest

from tests.pallas_kernels import conformance
from tests.pallas_kernels import gpu_interpreter

# The interpreter multiplies poison by NumPy before the kernel masks it.
pytestmark = pytest.mark.filterwarnings(
  "ignore:invalid value encountered in matmul:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def bfloat16():
  """The kernels read bfloat16 queries only."""
  with gpu_interpreter.bfloat16_by_default():
    yield


class TestAttention(conformance.AttentionConformance):
  implementation = gpu_interpreter.IMPLEMENTATION


class TestMasks(conformance.MaskConformance):
  implementation = gpu_interpreter.IMPLEMENTATION
