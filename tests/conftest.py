"""Every test runs on the CPU, with strict dtypes and ranks."""

import os

# Before anything imports JAX: tests never take an accelerator by accident.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_jax():
  """An implicit promotion in our code is a bug, so tests refuse it."""
  with (
    jax.numpy_dtype_promotion("strict"),
    jax.numpy_rank_promotion("raise"),
  ):
    yield
