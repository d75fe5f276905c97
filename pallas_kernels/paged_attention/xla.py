"""Plain XLA: the production path on CPU, the fallback elsewhere.

The cost follows the rows that queries see, not the width of tables.  Key rows
come in *blocks* of some pages, and queries that share a block's products are a
*tile*:

    decode   one query of a sequence; a step takes the next 8 (sequence, block)
             pairs of the whole batch, however they fall on sequences
    chunks   128 or 256 queries of one sequence, 32 for the rest

Each block's softmax stands alone and is merged into its tile's in the order of
blocks, so that a sequence's output does not depend on its neighbours.  A
block's pages are gathered as `[pages * kv_heads, page_size, head_dim]` at
`page * kv_heads + head`, which lands them in the order of the products: nothing
is transposed.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import bits
from pallas_kernels import page_shape
from pallas_kernels.paged_attention import operands as operands_lib
from pallas_kernels.paged_attention import tiles as tiles_lib
from pallas_kernels.paged_attention import visibility

_NOTHING = -jnp.inf


def why_unsupported(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> str | None:
  """None: it runs everything."""
  del operands, options
  return None


def paged_attention(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> tuple[jax.Array, jax.Array]:
  """`api.paged_attention`."""
  tokens, q_heads, _ = operands.q.shape
  call = _prepare(operands, options)
  if operands.query_starts is None:
    token = jnp.arange(tokens, dtype=jnp.int32)
    out, lse = _decode(call, token, jnp.ones(tokens, bool))
  else:
    out, lse = _ragged(call, operands.query_starts)
  out = out.reshape(tokens, q_heads, -1).astype(operands.q.dtype)
  return out, lse.reshape(tokens, q_heads)


@dataclasses.dataclass(frozen=True)
class _Call:
  """One call, with what all its groups share worked out."""

  operands: operands_lib.Operands
  options: operands_lib.Options
  tiles: tiles_lib.XlaTiles
  q: jax.Array  # [tokens, kv_heads, group, head_dim], scaled
  sequence: jax.Array  # int32 [tokens]
  first: jax.Array  # int32 [tokens], first row that a query sees
  end: jax.Array  # int32 [tokens], end of the rows that it sees
  k_table: jax.Array  # int32 [sequences, blocks, block_pages]
  v_table: jax.Array  # the same
  sinks: jax.Array | None  # [kv_heads, group]

  @property
  def block_rows(self) -> int:
    """Key rows of a block."""
    return self.k_table.shape[2] * self.options.page_size


def _prepare(
  operands: operands_lib.Operands, options: operands_lib.Options
) -> _Call:
  tiles = tiles_lib.choose_xla_tiles(operands, options)
  tokens, q_heads, head_dim = operands.q.shape
  kv_heads, group = options.kv_heads, q_heads // options.kv_heads
  width = operands.page_table.shape[1]
  pages = tiles.block_pages(options.page_size, width)
  blocks = -(-width // pages)

  def blocked(table: jax.Array) -> jax.Array:
    table = jnp.pad(table, ((0, 0), (0, blocks * pages - width)))
    return table.reshape(-1, blocks, pages)

  sequence, _ = visibility.sequence_of_tokens(operands)
  first, end = visibility.row_ranges(operands, options, sequence)
  k_table = blocked(operands.page_table)
  v_table = operands.v_page_table
  sinks = operands.sinks
  if sinks is not None:
    sinks = sinks.astype(jnp.float32).reshape(kv_heads, group)
  q = operands.q.astype(jnp.float32) * options.scale
  return _Call(
    operands=operands,
    options=options,
    tiles=tiles,
    q=q.reshape(tokens, kv_heads, group, head_dim),
    sequence=sequence,
    first=first,
    end=end,
    k_table=k_table,
    v_table=k_table if v_table is None else blocked(v_table),
    sinks=sinks,
  )


def _decode(
  call: _Call, token: jax.Array, single: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Sequences with one query.

  Args:
    call: of the whole batch.
    token: int32 `[sequences]`, the query row of each sequence that has one.
    single: bool `[sequences]`, which sequences have exactly one query.

  Returns:
    `(out, lse)`: `[sequences, kv_heads, group, head_dim]` and without the last
    axis; of the single sequences, the others hold anything.
  """
  sequences = single.shape[0]
  q, first, end = call.q[token], call.first[token], call.end[token]
  first_block, num_blocks = _block_range(call, first[:, None], end[:, None])
  num_blocks = jnp.where(single, num_blocks, 0)
  ends = jnp.cumsum(num_blocks, dtype=jnp.int32)
  size = call.tiles.decode_blocks

  def body(step: jax.Array, state: _Softmax) -> _Softmax:
    pair = step * size + jnp.arange(size, dtype=jnp.int32)
    member = (pair[:, None] >= ends[None]).sum(1, dtype=jnp.int32)
    real = pair < ends[-1]  # The last step has pairs that are not there.
    member = jnp.minimum(member, sequences - 1)
    block = (first_block + num_blocks - ends)[member] + pair
    partial = _block(
      call,
      member,
      jnp.where(real, block, 0),
      q[member][:, :, None],
      first[member][:, None],
      jnp.where(real, end[member], 0)[:, None],
    )

    def merge(at: jax.Array, state: _Softmax) -> _Softmax:
      row = member[at]
      merged = _merge([x[row] for x in state], [x[at] for x in partial])
      return tuple(
        lax.dynamic_update_index_in_dim(x, new, row, 0)
        for x, new in zip(state, merged, strict=True)
      )

    return lax.fori_loop(0, size, merge, state)

  state = lax.fori_loop(
    0, -(-ends[-1] // size), body, _start(call, sequences, 1)
  )
  out, lse = _finish(state)
  return out[:, :, 0], lse[:, :, 0]


def _ragged(call: _Call, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Any number of queries a sequence: tiles of chunks, and single queries."""
  tokens = call.q.shape[0]
  counts = starts[1:] - starts[:-1]
  wide, short = call.tiles.query_rows, call.tiles.short_query_rows
  in_tiles = counts // wide * wide
  left = jnp.where(counts > 1, counts - in_tiles, 0)
  # Short tiles are written whole and spill past their chunk, so they go first:
  # what they spill over is written after them, or masked below.
  short = min(short, tokens)
  state = _empty(call, tokens + short)
  state = _chunks(call, starts[:-1] + in_tiles, left, short, state)
  if tokens >= wide:
    state = _chunks(call, starts[:-1], in_tiles, wide, state)
  out, lse = state[0][:tokens], state[1][:tokens]
  single = counts == 1
  single_out, single_lse = _decode(
    call, jnp.minimum(starts[:-1], tokens - 1), single
  )
  token = jnp.arange(tokens, dtype=jnp.int32)
  real = (token < starts[-1])[:, None, None]
  alone = single[call.sequence][:, None, None]
  out = jnp.where(alone[..., None], single_out[call.sequence], out)
  lse = jnp.where(alone, single_lse[call.sequence], lse)
  return jnp.where(real[..., None], out, 0), jnp.where(real, lse, _NOTHING)


def _chunks(
  call: _Call,
  starts: jax.Array,
  counts: jax.Array,
  size: int,
  state: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Tiles of chunks, in the order of their rows.

  Args:
    call: of the whole batch.
    starts: int32 `[sequences]`, first query row of each sequence's chunk.
    counts: int32 `[sequences]`, query rows of each chunk; 0 leaves it out.
    size: query rows of a tile.
    state: `(out, lse)` so far, with room for a tile behind the last row.
  """
  num_tiles = -(-counts // size)
  ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
  pad = lambda x: jnp.pad(x, ((0, size),) + ((0, 0),) * (x.ndim - 1))
  q, first, end = pad(call.q), pad(call.first), pad(call.end)
  row = jnp.arange(size, dtype=jnp.int32)

  def body(
    at: jax.Array, state: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    member = (at >= ends).sum(dtype=jnp.int32)
    begin = (at - ends[member] + num_tiles[member]) * size
    token = starts[member] + begin
    mine = row < counts[member] - begin
    take = lambda x: lax.dynamic_slice_in_dim(x, token, size)
    out, lse = _walk(
      call,
      member,
      jnp.moveaxis(take(q), 0, 1),
      jnp.where(mine, take(first), 2**31 - 1),
      jnp.where(mine, take(end), 0),
    )
    out, lse = jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0)
    return (
      lax.dynamic_update_slice(state[0], out, (token, 0, 0, 0)),
      lax.dynamic_update_slice(state[1], lse, (token, 0, 0)),
    )

  return lax.fori_loop(0, ends[-1], body, state)


def _empty(call: _Call, rows: int) -> tuple[jax.Array, jax.Array]:
  _, kv_heads, group, _ = call.q.shape
  out = jnp.zeros((rows, kv_heads, group, call.options.v_head_dim))
  return out, jnp.full((rows, kv_heads, group), _NOTHING)


def _block_range(
  call: _Call, first: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The blocks that members' queries see, from row ranges `[members, rows]`.

  Returns:
    `(first_block, num_blocks)`: int32 `[members]` each.
  """
  rows = call.block_rows
  seen = first < end
  lowest = jnp.where(seen, first, 2**31 - 1).min(1)
  highest = jnp.where(seen, end, 0).max(1)
  first_block = jnp.where(highest > 0, lowest // rows, 0)
  return first_block, -(-highest // rows) - first_block


def _walk(
  call: _Call,
  member: jax.Array,  # int32 [], a sequence
  q: jax.Array,  # [kv_heads, rows, group, head_dim]
  first: jax.Array,  # int32 [rows]
  end: jax.Array,  # int32 [rows]
) -> tuple[jax.Array, jax.Array]:
  """A tile's queries over the blocks that they see.

  Returns:
    `(out, lse)`: `[kv_heads, rows, group, head_dim]`, and without the last
    axis.
  """
  members = member[None]
  q, first, end = q[None], first[None], end[None]
  first_block, num_blocks = _block_range(call, first, end)

  def body(step: jax.Array, state: _Softmax) -> _Softmax:
    partial = _block(call, members, first_block + step, q, first, end)
    return _merge(state, partial)

  start = _start(call, 1, q.shape[2])
  out, lse = _finish(lax.fori_loop(0, num_blocks[0], body, start))
  return out[0], lse[0]


# Sum of weighted values `[..., head_dim]`, greatest logit and sum of weights
# `[...]`, of members' tiles: `...` is `members, kv_heads, rows, group`.
_Softmax = tuple[jax.Array, jax.Array, jax.Array]


def _start(call: _Call, size: int, rows: int) -> _Softmax:
  """The state before any key: nothing, or the sinks."""
  _, kv_heads, group, _ = call.q.shape
  shape = (size, kv_heads, rows, group)
  out = jnp.zeros((*shape, call.options.v_head_dim))
  if call.sinks is None:
    return out, jnp.full(shape, _NOTHING), jnp.zeros(shape)
  top = jnp.broadcast_to(call.sinks[:, None], shape)
  # A sink of -inf is no sink.
  return out, top, jnp.where(top == _NOTHING, 0.0, 1.0)


def _merge(
  state: Sequence[jax.Array], partial: Sequence[jax.Array]
) -> _Softmax:
  """The softmax over the keys of both."""
  new_top = jnp.maximum(state[1], partial[1])
  safe_top = jnp.where(new_top == _NOTHING, 0, new_top)
  old, new = jnp.exp(state[1] - safe_top), jnp.exp(partial[1] - safe_top)
  out = state[0] * old[..., None] + partial[0] * new[..., None]
  return out, new_top, state[2] * old + partial[2] * new


def _finish(state: _Softmax) -> tuple[jax.Array, jax.Array]:
  """Output and log-sum-exp of all keys."""
  out, top, total = state
  divisor = jnp.where(total == 0, 1, total)
  lse = jnp.where(total == 0, _NOTHING, top + jnp.log(divisor))
  return out / divisor[..., None], lse


def _block(
  call: _Call,
  members: jax.Array,  # int32 [members], sequences
  blocks: jax.Array,  # int32 [members]
  q: jax.Array,  # [members, kv_heads, rows, group, head_dim]
  first: jax.Array,  # int32 [members, rows]
  end: jax.Array,  # int32 [members, rows]
) -> _Softmax:
  """The softmax over one block of each member, alone."""
  operands, options = call.operands, call.options
  k_ids, v_ids = call.k_table[members, blocks], call.v_table[members, blocks]
  row = jnp.arange(call.block_rows, dtype=jnp.int32)
  key_row = (blocks * call.block_rows)[:, None] + row[None]
  seen = (key_row[:, None] >= first[..., None]) & (
    key_row[:, None] < end[..., None]
  )  # [members, rows, block_rows]
  shape = q.shape[:-1]
  tile = q.reshape(*shape[:2], -1, q.shape[-1])
  k = _gather(operands.k_pages, k_ids, options.k_geometry)
  logits = jnp.einsum("mhqd,mhrd->mhqr", tile, k, precision="highest")
  if operands.k_scales is not None:
    logits *= _gather_scales(operands.k_scales, k_ids, options)[:, :, None]
  if options.soft_cap is not None:
    logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
  logits = logits.reshape(*shape, -1)
  shown = seen[:, None, :, None]
  logits = jnp.where(shown, logits, _NOTHING)
  top = logits.max(-1)
  weights = jnp.exp(logits - jnp.where(top == _NOTHING, 0, top)[..., None])
  total = weights.sum(-1)
  if operands.v_scales is not None:
    factors = _gather_scales(operands.v_scales, v_ids, options)
    weights = jnp.where(shown, weights * factors[:, :, None, None], 0)
  # A weight of zero does not silence a NaN: rows that no query sees are zeroed.
  v = _gather(operands.v_pages, v_ids, options.v_geometry)
  v = jnp.where(seen.any(1)[:, None, :, None], v, 0)
  weights = weights.reshape(*tile.shape[:-1], -1)
  out = jnp.einsum("mhqr,mhrd->mhqd", weights, v, precision="highest")
  return out.reshape(*shape, -1), top, total


def _gather(
  pages: jax.Array,  # [pages, kv_heads, page_size // fold, lane]
  ids: jax.Array,  # int32 [members, block_pages]
  geometry: page_shape.PageGeometry,
) -> jax.Array:
  """Rows of pages, float32 `[members, kv_heads, block_rows, head_dim]`."""
  kv_heads, page_size = geometry.kv_heads, geometry.page_size
  head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
  at = ids[:, None, :] * kv_heads + head
  flat = pages.reshape(-1, page_size, geometry.stored_dim)
  found = bits.load(flat.at[at].get(mode="promise_in_bounds"))
  found = found.reshape(len(ids), kv_heads, -1, geometry.stored_dim)
  return found[..., : geometry.head_dim].astype(jnp.float32)


def _gather_scales(
  scales: jax.Array,  # float32 [pages, 1, scale lanes]
  ids: jax.Array,  # int32 [members, block_pages]
  options: operands_lib.Options,
) -> jax.Array:
  """Scales of rows of pages, `[members, kv_heads, block_rows]`."""
  size, pages = ids.shape
  kv_heads, page_size = options.kv_heads, options.page_size
  found = scales[:, 0].at[ids].get(mode="promise_in_bounds")
  found = found[..., : kv_heads * page_size]
  found = found.reshape(size, pages, kv_heads, page_size)
  return found.swapaxes(1, 2).reshape(size, kv_heads, -1)
