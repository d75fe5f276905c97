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
from typing import NamedTuple

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
  token = jnp.arange(tokens, dtype=jnp.int32)
  if operands.query_starts is None:
    state = _decode(call, token, jnp.ones(tokens, bool), _start(call, tokens))
    out, lse = _finish(state)
  else:
    out, lse = _finish(_ragged(call, operands.query_starts))
    real = (token < operands.query_starts[-1])[:, None, None]
    out = jnp.where(real[..., None], out[:tokens], 0)
    lse = jnp.where(real, lse[:tokens], _NOTHING)
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


class _Softmax(NamedTuple):
  """A softmax over some keys.

  Of query rows the shape is `rows, kv_heads, group`, of members' tiles
  `members, kv_heads, rows, group`.
  """

  out: jax.Array  # [*shape, head_dim], sum of weighted values
  top: jax.Array  # [*shape], greatest logit
  total: jax.Array  # [*shape], sum of weights


def _decode(
  call: _Call, token: jax.Array, single: jax.Array, state: _Softmax
) -> _Softmax:
  """Adds the keys of sequences with one query, some blocks at a time.

  Args:
    call: of the whole batch.
    token: int32 `[sequences]`, the query row of each sequence that has one.
    single: bool `[sequences]`, which sequences have exactly one query.
    state: of all query rows.
  """
  q, first, end = call.q[token], call.first[token], call.end[token]
  first_block, num_blocks = _block_range(call, first[:, None], end[:, None])
  num_blocks = jnp.where(single, num_blocks, 0)
  ends = jnp.cumsum(num_blocks, dtype=jnp.int32)
  size = call.tiles.decode_blocks

  def body(step: jax.Array, state: _Softmax) -> _Softmax:
    pair = step * size + jnp.arange(size, dtype=jnp.int32)
    member = (pair[:, None] >= ends[None]).sum(1, dtype=jnp.int32)
    real = pair < ends[-1]  # The last step has pairs that are not there.
    member = jnp.minimum(member, len(single) - 1)
    block = (first_block + num_blocks - ends)[member] + pair
    partial = _block(
      call,
      member,
      jnp.where(real, block, 0),
      q[member][:, :, None],
      first[member][:, None],
      jnp.where(real, end[member], 0)[:, None],
    )
    row = token[member]

    def merge(at: jax.Array, state: _Softmax) -> _Softmax:
      alone = jax.tree.map(lambda x: x[at, :, 0][None], partial)
      return _merge_rows(state, row[at], alone)

    return lax.fori_loop(0, size, merge, state)

  return lax.fori_loop(0, -(-ends[-1] // size), body, state)


def _ragged(call: _Call, starts: jax.Array) -> _Softmax:
  """Any number of queries a sequence: tiles of chunks, and single queries.

  Returns:
    The state of all query rows and of some that are not there.
  """
  tokens = call.q.shape[0]
  counts = starts[1:] - starts[:-1]
  wide = call.tiles.query_rows
  short = min(call.tiles.short_query_rows, tokens)
  in_tiles = counts // wide * wide
  left = jnp.where(counts > 1, counts - in_tiles, 0)
  # A tile may reach past the last row.
  state = _start(call, tokens + max(wide, short))
  if tokens >= wide:
    state = _chunks(call, starts[:-1], in_tiles, wide, state)
  state = _chunks(call, starts[:-1] + in_tiles, left, short, state)
  first_row = jnp.minimum(starts[:-1], tokens - 1)
  return _decode(call, first_row, counts == 1, state)


def _chunks(
  call: _Call,
  starts: jax.Array,
  counts: jax.Array,
  size: int,
  state: _Softmax,
) -> _Softmax:
  """Adds the keys of chunks, a tile of their queries at a time.

  Args:
    call: of the whole batch.
    starts: int32 `[sequences]`, first query row of each sequence's chunk.
    counts: int32 `[sequences]`, query rows of each chunk; 0 leaves it out.
    size: query rows of a tile.
    state: of all query rows, and of `size` more.
  """
  num_tiles = -(-counts // size)
  ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
  pad = lambda x: jnp.pad(x, ((0, size),) + ((0, 0),) * (x.ndim - 1))
  q, first, end = pad(call.q), pad(call.first), pad(call.end)
  row = jnp.arange(size, dtype=jnp.int32)

  def body(at: jax.Array, state: _Softmax) -> _Softmax:
    member = (at >= ends).sum(dtype=jnp.int32)
    begin = (at - ends[member] + num_tiles[member]) * size
    token = starts[member] + begin
    mine = row < counts[member] - begin  # The others see no key here.
    take = lambda x: lax.dynamic_slice_in_dim(x, token, size)
    found = _walk(
      call,
      member,
      jnp.moveaxis(take(q), 0, 1),
      jnp.where(mine, take(first), 2**31 - 1),
      jnp.where(mine, take(end), 0),
    )
    found = jax.tree.map(lambda x: jnp.moveaxis(x[0], 1, 0), found)
    return _merge_rows(state, token, found)

  return lax.fori_loop(0, ends[-1], body, state)


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
) -> _Softmax:
  """A tile's queries over the blocks that they see, one after another."""
  members = member[None]
  q, first, end = q[None], first[None], end[None]
  first_block, num_blocks = _block_range(call, first, end)

  def body(step: jax.Array, state: _Softmax) -> _Softmax:
    partial = _block(call, members, first_block + step, q, first, end)
    return _merge(state, partial)

  start = _no_keys(call, q.shape[:-1])
  return lax.fori_loop(0, num_blocks[0], body, start)


def _start(call: _Call, rows: int) -> _Softmax:
  """The state of query rows before any key: nothing, or the sinks."""
  shape = (rows, *call.q.shape[1:-1])
  start = _no_keys(call, shape)
  if call.sinks is None:
    return start
  top = jnp.broadcast_to(call.sinks[None], shape)
  # A sink of -inf is no sink.
  return start._replace(top=top, total=jnp.where(top == _NOTHING, 0.0, 1.0))


def _no_keys(call: _Call, shape: tuple[int, ...]) -> _Softmax:
  out = jnp.zeros((*shape, call.options.v_head_dim))
  return _Softmax(out, jnp.full(shape, _NOTHING), jnp.zeros(shape))


def _merge(state: _Softmax, other: _Softmax) -> _Softmax:
  """The softmax over the keys of both; no keys change no bit."""
  top = jnp.maximum(state.top, other.top)
  safe_top = jnp.where(top == _NOTHING, 0, top)
  old, new = jnp.exp(state.top - safe_top), jnp.exp(other.top - safe_top)
  out = state.out * old[..., None] + other.out * new[..., None]
  return _Softmax(out, top, state.total * old + other.total * new)


def _merge_rows(state: _Softmax, row: jax.Array, other: _Softmax) -> _Softmax:
  """Merges into the query rows from `row` on."""
  size = len(other.top)
  mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, size), state)
  return jax.tree.map(
    lambda x, merged: lax.dynamic_update_slice_in_dim(x, merged, row, 0),
    state,
    _merge(mine, other),
  )


def _finish(state: _Softmax) -> tuple[jax.Array, jax.Array]:
  """Output and log-sum-exp of all keys."""
  empty = state.total == 0
  divisor = jnp.where(empty, 1, state.total)
  lse = jnp.where(empty, _NOTHING, state.top + jnp.log(divisor))
  return state.out / divisor[..., None], lse


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
  return _Softmax(out.reshape(*shape, -1), top, total)


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
