"""Which sequence a query row belongs to, and which rows it sees.

Causality, windows, lengths and positions all come down to one interval of rows
for each query: `[first, end)`.  Shared by `xla` and kernels that want it; the
tests' oracle has its own.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import operands as operands_lib


def sequence_of_tokens(
  operands: operands_lib.Operands,
) -> tuple[jax.Array, jax.Array]:
  """The sequence of each query row, and whether it is a real row.

  Returns:
    `(sequence, real)`: int32 `[tokens]` below the number of sequences, and bool
    `[tokens]`.
  """
  tokens = operands.q.shape[0]
  sequences = operands.context_lens.shape[0]
  token = jnp.arange(tokens, dtype=jnp.int32)
  starts = operands.query_starts
  if starts is None:
    return token, jnp.ones(tokens, bool)
  # Comparing beats a binary search: both axes are short.
  sequence = (token[:, None] >= starts[None, 1:]).sum(1, dtype=jnp.int32)
  real = token < starts[-1]
  return jnp.minimum(sequence, sequences - 1), real


def token_positions(
  operands: operands_lib.Operands, sequence: jax.Array
) -> jax.Array:
  """The position of each query row, int32 `[tokens]`.

  Args:
    operands: of the call.
    sequence: int32 `[tokens]`, the sequence of each row.
  """
  if operands.query_positions is not None:
    return operands.query_positions
  if operands.query_starts is None:
    first = operands.context_lens - 1
  else:
    first = operands.context_lens - operands.query_starts[1:]
  if operands.key_starts is not None:
    first = first + operands.key_starts
  if operands.query_starts is None:
    return first
  token = jnp.arange(operands.q.shape[0], dtype=jnp.int32)
  return first[sequence] + token


def row_ranges(
  operands: operands_lib.Operands,
  options: operands_lib.Options,
  sequence: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The rows that each query sees: `first <= row < end`.

  Args:
    operands: of the call.
    options: of the call.
    sequence: int32 `[tokens]`, the sequence of each query row.

  Returns:
    `(first, end)`: int32 `[tokens]` each; `end <= first` where none is seen.
  """
  end = operands.context_lens
  if operands.query_starts is not None:
    end = end[sequence]
  first = jnp.zeros_like(end)
  if not options.causal and operands.window is None:
    return first, end
  position = token_positions(operands, sequence)
  if operands.key_starts is not None:
    position = position - operands.key_starts[sequence]
  if operands.window is not None:
    # Subtracted only where it cannot wrap: a window may be as large as int32,
    # and a position, seen from the first key, below zero.
    behind = jnp.asarray(operands.window, jnp.int32) - 1
    first = jnp.where(position < behind, first, position - behind)
  if options.causal:
    end = jnp.minimum(end, position + 1)
  return first, end
