"""What one step tells the device, as one packed int32 array."""

import dataclasses

import jax

from host_allocator import tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepArrays:
  """The page-index arrays of one step's batch.

  One buffer, one upload; the fields are slices of it, cut inside the jitted
  step. T is the bucket's token rows, S its sequences; both are padded (see
  `host_allocator.tables.Packing`), so consumers go by `query_starts` and
  `context_lens`.
  """

  packed: jax.Array  # int32 [packing.size]
  packing: tables.Packing = dataclasses.field(metadata={"static": True})

  @property
  def num_tokens(self) -> int:
    return self.packing.shape.num_tokens

  @property
  def num_sequences(self) -> int:
    return self.packing.shape.num_sequences

  @property
  def is_decode(self) -> bool:
    """Whether token row i is the one row of sequence i."""
    return self.num_tokens == self.num_sequences

  @property
  def tokens(self) -> jax.Array:
    """int32 [T], the token ids to compute."""
    return self._field("tokens")

  @property
  def positions(self) -> jax.Array:
    """int32 [T], each token's position in its sequence."""
    return self._field("positions")

  @property
  def sequence_rows(self) -> jax.Array:
    """int32 [T], the batch row of each token; S where it is padding."""
    return self._field("sequence_rows")

  @property
  def context_lens(self) -> jax.Array:
    """int32 [S], rows visible once this step has written; 0 is padding."""
    return self._field("context_lens")

  @property
  def query_starts(self) -> jax.Array:
    """int32 [S + 1], where each sequence's token rows begin."""
    return self._field("query_starts")

  @property
  def logit_rows(self) -> jax.Array:
    """int32 [S], the last token row of each sequence."""
    return self._field("logit_rows")

  def slots(self, group: int = 0) -> jax.Array:
    """int32 [T], `page * page_size + offset` that each token's row takes."""
    return self._field("slots", group)

  def page_table(self, group: int = 0) -> jax.Array:
    """int32 [S, pages], null-page padded, page ids within one layer."""
    return self._field("page_table", group)

  def _field(self, name: str, group: int | None = None) -> jax.Array:
    return self.packing.field(self.packed, name, group)
