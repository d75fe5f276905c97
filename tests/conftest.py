"""Every test runs on the CPU, with strict dtypes and ranks."""

import os
import pathlib

# Before anything imports JAX: tests never take an accelerator by accident.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

# Most of a test run is compiling. What was compiled once is kept, by version.
_COMPILED = pathlib.Path(__file__).parent.parent / ".jax_cache"
jax.config.update(
  "jax_compilation_cache_dir", str(_COMPILED / f"tests-{jax.__version__}")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True)
def strict_jax():
  """An implicit promotion in our code is a bug, so tests refuse it."""
  with (
    jax.numpy_dtype_promotion("strict"),
    jax.numpy_rank_promotion("raise"),
  ):
    yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Few tests that take minutes begin first, so that no worker ends alone."""
  items.sort(key=lambda item: "tests/system/" not in item.nodeid)
