"""Ragged query rows, cut into tiles that each belong to one sequence.

tokens   a a a b c c c c c        2 tokens a tile
tiles    [a a] [a .] [b .] [c c] [c c] [c .] [. .]
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

# What a padded row never bounds.
FAR = 2**30


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "token_of_slot",
    "slot_of_token",
    "real",
    "row_lo",
    "row_hi",
    "facts",
  ),
  meta_fields=("group", "padded_group"),
)
@dataclasses.dataclass(frozen=True)
class Plan:
  """Where each query row goes, and what each tile reads.

  Attributes:
    group: query heads of a KV head.
    padded_group: rows of a tile that one token takes.
    token_of_slot: int32 [tiles, tokens of a tile], 0 where padded.
    slot_of_token: int32 [tokens], into the flat slots.
    real: bool [tokens], whether a token belongs to a sequence.
    row_lo: int32 [tiles, rows], the first key row that each query row sees.
    row_hi: int32 [tiles, rows], one past the last.
    facts: int32 [tiles, 5]: the sequence; the first key row that some query
      row sees and one past the last; the same of those that all see.
  """

  group: int
  padded_group: int
  token_of_slot: jax.Array
  slot_of_token: jax.Array
  real: jax.Array
  row_lo: jax.Array
  row_hi: jax.Array
  facts: jax.Array

  @property
  def num_tiles(self) -> int:
    """Tiles of the call, the empty ones included."""
    return self.token_of_slot.shape[0]


def plan(
  query_starts: jax.Array,  # int32 [sequences + 1]
  lo: jax.Array,  # int32 [tokens]
  hi: jax.Array,  # int32 [tokens]
  *,
  rows: int,
  group: int,
) -> Plan:
  """Cuts ragged query rows into tiles; all of it is data, none of it shape.

  Args:
    query_starts: first token of each sequence, and the end of the last.
    lo: the first key row that each token sees.
    hi: one past the last.
    rows: query rows of a tile, a power of two.
    group: query heads of a KV head.
  """
  tokens = lo.shape[0]
  sequences = query_starts.shape[0] - 1
  padded_group = 1 << (group - 1).bit_length()
  per_tile = rows // padded_group
  num_tiles = min(tokens, tokens // per_tile + sequences)

  counts = query_starts[1:] - query_starts[:-1]
  tile_ends = jnp.cumsum(-(-counts // per_tile), dtype=jnp.int32)
  tile_starts = tile_ends - (-(-counts // per_tile))
  tile = jnp.arange(num_tiles, dtype=jnp.int32)
  sequence = _count_at_most(tile_ends, tile, sequences)
  first = query_starts[sequence] + (tile - tile_starts[sequence]) * per_tile
  token = first[:, None] + jnp.arange(per_tile, dtype=jnp.int32)[None, :]
  used = (token < query_starts[sequence + 1][:, None]) & (tile < tile_ends[-1])[
    :, None
  ]
  token = jnp.where(used, token, 0)

  each = jnp.arange(tokens, dtype=jnp.int32)
  owner = _count_at_most(query_starts[1:], each, sequences)
  offset = each - query_starts[owner]
  slot = tile_starts[owner] * per_tile + offset
  real = each < query_starts[-1]

  slot_lo, slot_hi = lo[token], hi[token]
  facts = jnp.stack(
    [
      sequence,
      jnp.where(used, slot_lo, FAR).min(1),
      jnp.where(used, slot_hi, 0).max(1),
      jnp.where(used, slot_lo, 0).max(1),
      jnp.where(used, slot_hi, FAR).min(1),
    ],
    axis=1,
  )
  return Plan(
    group=group,
    padded_group=padded_group,
    token_of_slot=token,
    slot_of_token=jnp.where(real, slot, 0),
    real=real,
    row_lo=jnp.repeat(slot_lo, padded_group, axis=1),
    row_hi=jnp.repeat(slot_hi, padded_group, axis=1),
    facts=facts,
  )


def _count_at_most(ends: jax.Array, value: jax.Array, most: int) -> jax.Array:
  """How many of `ends` are at most each value, below `most`."""
  count = (value[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
  return jnp.minimum(count, most - 1)


def gather(q: jax.Array, plan: Plan, kv_heads: int) -> jax.Array:
  """Queries in tiles, [kv_heads, tiles, rows, head_dim].

  Args:
    q: [tokens, q_heads, head_dim].
    plan: of the call.
    kv_heads: KV heads of a page.
  """
  tiled = q[plan.token_of_slot].reshape(
    *plan.token_of_slot.shape, kv_heads, plan.group, -1
  )
  extra = plan.padded_group - plan.group
  tiled = jnp.pad(tiled, [(0, 0)] * 3 + [(0, extra), (0, 0)])
  tiled = jnp.moveaxis(tiled, 2, 0)
  return tiled.reshape(kv_heads, plan.num_tiles, -1, q.shape[-1])


def scatter(x: jax.Array, plan: Plan) -> jax.Array:
  """Results out of their tiles, [tokens, q_heads, ...]; padded rows are last.

  Args:
    x: [kv_heads, tiles, rows, ...].
    plan: of the call.
  """
  kv_heads, rest = x.shape[0], x.shape[3:]
  slots = x.reshape(kv_heads, -1, plan.padded_group, *rest)
  found = slots[:, plan.slot_of_token, : plan.group]
  found = jnp.moveaxis(found, 0, 1)
  return found.reshape(found.shape[0], -1, *rest)
