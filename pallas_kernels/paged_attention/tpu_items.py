"""Work items of ragged prefill: the share of one sequence in one query tile.

Query rows lie one sequence after another, and tiles of them know no sequence:

    tokens      0         8         16        24
    tiles       |    0    |    1    |    2    |
    sequences   |  0 |     1      |2| pad     |
    items       |0,0 | 0,1| 1,1   |1,2| 1,- | 2,- |

Every boundary of either kind begins an item, so their number is a constant:
tiles plus sequences, some of them empty.  A tile's items follow each other, and
each adds its keys to the rows of its own sequence.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import tpu_stream


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "tile",
    "sequence",
    "first_token",
    "end_token",
    "first_row",
    "end_row",
    "next_live",
  ),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Items:
  """The items of a call, in order.

  `tile` has an entry more than items, another tile's than the last.
  """

  tile: jax.Array  # int32 [items + 1]
  sequence: jax.Array  # int32 [items]
  first_token: jax.Array  # int32 [items], within the tile
  end_token: jax.Array  # int32 [items]
  first_row: jax.Array  # int32 [items], of the keys that its queries see
  end_row: jax.Array  # int32 [items]
  next_live: jax.Array  # int32 [items + 1]


def make(
  operands: operands_lib.Operands,
  seen: tuple[jax.Array, jax.Array],
  query_block: int,
  num_tiles: int,
) -> Items:
  """The items of a ragged call.

  Args:
    operands: of the call.
    seen: the first row that each token sees and one past its last, int32
      `[tokens]`; one past is at most the first where it sees nothing.
    query_block: tokens of a tile.
    num_tiles: tiles that hold all tokens.
  """
  starts = operands.query_starts
  assert starts is not None
  sequences = starts.shape[0] - 1
  end = num_tiles * query_block
  tile_starts = jnp.arange(num_tiles, dtype=jnp.int32) * query_block
  bounds = jnp.sort(jnp.append(tile_starts, starts[1:]))
  first, after = bounds, jnp.append(bounds[1:], jnp.int32(end))
  tile = jnp.minimum(first // query_block, num_tiles - 1)
  # Comparing beats a binary search: both axes are short.
  sequence = (first[:, None] >= starts[None, 1:]).sum(1, dtype=jnp.int32)

  token = jnp.arange(seen[0].shape[0], dtype=jnp.int32)
  sees = (token[None] >= first[:, None]) & (token[None] < after[:, None])
  sees &= (seen[1] > seen[0])[None]
  none = jnp.int32(2**31 - 1)
  first_row = jnp.where(sees, seen[0][None], none).min(1, initial=none)
  end_row = jnp.where(sees, seen[1][None], 0).max(1, initial=0)
  first_row = jnp.minimum(first_row, end_row)
  return Items(
    tile=jnp.append(tile, jnp.int32(num_tiles)),
    sequence=jnp.minimum(sequence, sequences - 1),
    first_token=first - tile * query_block,
    end_token=after - tile * query_block,
    first_row=first_row,
    end_row=end_row,
    next_live=tpu_stream.next_live(first_row, end_row),
  )
