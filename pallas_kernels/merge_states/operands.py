"""What every implementation of merging is given."""

import dataclasses
import functools

import jax


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("outs", "lses"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Operands:
  """The arrays of one call."""

  outs: jax.Array  # [parts, tokens, heads, head_dim]
  lses: jax.Array  # float32 [parts, tokens, heads]


@dataclasses.dataclass(frozen=True)
class Options:
  """The static side of one call: nothing."""
