"""Plain XLA: the production path on CPU, the fallback elsewhere.

The cost follows the rows that queries see, not the width of tables.  Queries
come in *groups* that share the products of a block of key rows:

    decode   8 sequences, one query each, sorted so that a group's contexts are
             about as long as each other
    chunks   a tile of 128 or 256 queries of one sequence, of 32 for the rest

A group walks its blocks with a running softmax.  A block's pages are gathered
as `[pages * kv_heads, page_size, head_dim]` at `page * kv_heads + head`, which
lands them in the order of the products: nothing is transposed.
"""

import dataclasses

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
  """Sequences with one query, several at a time.

  Args:
    call: of the whole batch.
    token: int32 `[sequences]`, the query row of each sequence that has one.
    single: bool `[sequences]`, which sequences have exactly one query.

  Returns:
    `(out, lse)`: `[sequences, kv_heads, group, head_dim]` and without the last
    axis; of the single sequences, the others hold anything.
  """
  sequences = single.shape[0]
  first_block, num_blocks = _block_range(
    call, call.first[token][:, None], call.end[token][:, None]
  )
  # Longest first, so that groups are even; those not asked for come last.
  order = jnp.argsort(jnp.where(single, -num_blocks, 1), stable=True).astype(
    jnp.int32
  )
  size = min(call.tiles.decode_sequences, sequences)
  groups = -(-sequences // size)
  order = jnp.pad(order, (0, groups * size - sequences), mode="edge")
  count = -(-single.sum(dtype=jnp.int32) // size)

  def body(
    at: jax.Array, state: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    members = lax.dynamic_slice(order, (at * size,), (size,))
    rows = token[members]
    out, lse = _walk(
      call,
      members,
      call.q[rows][:, :, None],
      call.first[rows][:, None],
      call.end[rows][:, None],
      first_block[members],
      num_blocks[members],
    )
    return (
      lax.dynamic_update_slice(state[0], out[:, :, 0], (at * size, 0, 0, 0)),
      lax.dynamic_update_slice(state[1], lse[:, :, 0], (at * size, 0, 0)),
    )

  state = _empty(call, groups * size)
  out, lse = lax.fori_loop(
    0, groups if call.operands.is_decode else count, body, state
  )
  place = jnp.zeros(sequences, jnp.int32)
  place = place.at[order[:sequences]].set(
    jnp.arange(sequences, dtype=jnp.int32)
  )
  return out[place], lse[place]


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
    take = lambda x: lax.dynamic_slice_in_dim(x, token, size)[None]
    seen_first = jnp.where(mine, take(first)[0], 2**31 - 1)[None]
    seen_end = jnp.where(mine, take(end)[0], 0)[None]
    out, lse = _walk(
      call,
      member[None],
      jnp.moveaxis(take(q), 1, 2),
      seen_first,
      seen_end,
      *_block_range(call, seen_first, seen_end),
    )
    out, lse = (jnp.moveaxis(x[0], 1, 0) for x in (out, lse))
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
  members: jax.Array,  # int32 [members], sequences
  q: jax.Array,  # [members, kv_heads, rows, group, head_dim]
  first: jax.Array,  # int32 [members, rows]
  end: jax.Array,  # int32 [members, rows]
  first_block: jax.Array,  # int32 [members]
  num_blocks: jax.Array,  # int32 [members]
) -> tuple[jax.Array, jax.Array]:
  """A group's queries over its members' blocks, with a running softmax.

  Returns:
    `(out, lse)`: `[members, kv_heads, rows, group, head_dim]`, and without the
    last axis.
  """
  size, kv_heads, rows, group, head_dim = q.shape
  heads = q.reshape(size, kv_heads, rows * group, head_dim)
  k_table, v_table = call.k_table[members], call.v_table[members]
  member = jnp.arange(size, dtype=jnp.int32)
  last_block = call.k_table.shape[1] - 1

  def body(step: jax.Array, state: _Softmax) -> _Softmax:
    # A member with fewer blocks sees nothing of those that it has not.
    block = jnp.minimum(first_block + step, last_block)
    begin = (first_block + step)[:, None] * call.block_rows
    key_row = begin + _row_order(call)[None, :]
    seen = (key_row[:, None] >= first[..., None]) & (
      key_row[:, None] < end[..., None]
    )  # [members, rows, block_rows]
    return _block(
      call, heads, k_table[member, block], v_table[member, block], seen, state
    )

  state = _start(call, size, rows, group)
  out, top, total = lax.fori_loop(0, num_blocks.max(), body, state)
  divisor = jnp.where(total == 0, 1, total)
  lse = jnp.where(total == 0, _NOTHING, top + jnp.log(divisor))
  out = out / divisor[..., None]
  shape = (size, kv_heads, rows, group)
  return out.reshape(*shape, -1), lse.reshape(shape)


def _row_order(call: _Call) -> jax.Array:
  """The rows of a block in the order of a gather: first rows of all pages.

  The pages of a block are read side by side: memory then serves as many streams
  at once, where page after page would wait for the start of each.
  """
  block_pages, page_size = call.k_table.shape[2], call.options.page_size
  row = jnp.arange(page_size, dtype=jnp.int32)[:, None]
  page = jnp.arange(block_pages, dtype=jnp.int32)[None, :]
  return (page * page_size + row).reshape(-1)


# Sum of weighted values, greatest logit, sum of weights.
_Softmax = tuple[jax.Array, jax.Array, jax.Array]


def _start(call: _Call, size: int, rows: int, group: int) -> _Softmax:
  """The state before any key: nothing, or the sinks."""
  shape = (size, call.options.kv_heads, rows * group)
  out = jnp.zeros((*shape, call.options.v_head_dim))
  if call.sinks is None:
    return out, jnp.full(shape, _NOTHING), jnp.zeros(shape)
  top = jnp.tile(call.sinks[None], (size, 1, rows))
  # A sink of -inf is no sink.
  return out, top, jnp.where(top == _NOTHING, 0.0, 1.0)


def _block(
  call: _Call,
  q: jax.Array,  # [members, kv_heads, queries, head_dim]
  k_ids: jax.Array,  # int32 [members, block_pages]
  v_ids: jax.Array,  # int32 [members, block_pages]
  seen: jax.Array,  # bool [members, rows, block_rows]
  state: _Softmax,
) -> _Softmax:
  """Folds one block of each member into its running softmax."""
  operands, options = call.operands, call.options
  out, top, total = state
  size, _, queries, _ = q.shape
  k = _gather(operands.k_pages, k_ids, options.k_geometry)
  logits = jnp.einsum("mhqd,mhrd->mhqr", q, k, precision="highest")
  if operands.k_scales is not None:
    logits *= _gather_scales(operands.k_scales, k_ids, options)[:, :, None]
  if options.soft_cap is not None:
    logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
  group = queries // seen.shape[1]
  shown = jnp.broadcast_to(
    seen[:, None, :, None], (size, 1, seen.shape[1], group, seen.shape[2])
  ).reshape(size, 1, queries, -1)
  logits = jnp.where(shown, logits, _NOTHING)
  new_top = jnp.maximum(top, logits.max(-1))
  safe_top = jnp.where(new_top == _NOTHING, 0, new_top)
  decay = jnp.exp(top - safe_top)
  weights = jnp.exp(logits - safe_top[..., None])
  total = total * decay + weights.sum(-1)
  if operands.v_scales is not None:
    factors = _gather_scales(operands.v_scales, v_ids, options)[:, :, None]
    weights = jnp.where(shown, weights * factors, 0)
  # A weight of zero does not silence a NaN: rows that no query sees are zeroed.
  v = _gather(operands.v_pages, v_ids, options.v_geometry)
  v = jnp.where(seen.any(1)[:, None, :, None], v, 0)
  added = jnp.einsum("mhqr,mhrd->mhqd", weights, v, precision="highest")
  return out * decay[..., None] + added, new_top, total


def _gather(
  pages: jax.Array,  # [pages, kv_heads, page_size // fold, lane]
  ids: jax.Array,  # int32 [members, block_pages]
  geometry: page_shape.PageGeometry,
) -> jax.Array:
  """Rows of pages, float32 `[members, kv_heads, block_rows, head_dim]`."""
  kv_heads, page_size = geometry.kv_heads, geometry.page_size
  head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None, None]
  row = jnp.arange(page_size, dtype=jnp.int32)[None, None, :, None]
  at = (ids[:, None, None, :] * kv_heads + head) * page_size + row
  flat = pages.reshape(-1, geometry.stored_dim)
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
  return found.transpose(0, 2, 3, 1).reshape(size, kv_heads, -1)
