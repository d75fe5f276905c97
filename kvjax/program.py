"""The engine's one jitted function: the model's step, then the draw."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any
from typing import Protocol

import jax
from flax import nnx

from host_allocator import layout as layouts
from kvjax import pages as pages_lib
from kvjax import sampling
from kvjax import step as step_lib


class Model(Protocol):
  """What the engine needs of a model; `kvjax.models.Decoder` is one.

  An `nnx.Module` has its state split off once and passed to every step; any
  other object is called as it is, its arrays constants of the step.
  """

  config: Any  # has vocab_size, context_length, perhaps eos_ids

  def cache_layout(self, *, page_size: int) -> layouts.CacheLayout:
    """The cache groups of its layers."""
    ...

  def __call__(
    self, pages: pages_lib.Pages, step: step_lib.StepArrays, /
  ) -> tuple[jax.Array, pages_lib.Pages]:
    """Float32 logits `[S, vocab]` at `step.logit_rows`, successor pages."""
    ...


@dataclasses.dataclass
class _Compiled:
  """A model's jitted step, shared by all engines that run this model.

  Attributes:
    structure: what the function was made for; it changes when somebody
      changes the module's structure.
    run: the jitted function.
    traces: shapes compiled so far, over all engines.
  """

  structure: Any
  run: Callable[..., tuple[jax.Array, pages_lib.Pages]]
  traces: int = 0


_compiled: weakref.WeakKeyDictionary[Model, _Compiled] = (
  weakref.WeakKeyDictionary()
)


class StepProgram:
  """A model and the sampler, compiled once per step shape.

  Attributes:
    compilations: shapes that this program's own calls compiled.
  """

  def __init__(self, model: Model):
    self.compilations = 0
    if isinstance(model, nnx.Module):
      graph, state = nnx.split(model)
      # Plain leaves: an nnx.State is flattened in Python, at every call.
      self._leaves, tree = jax.tree.flatten(state)
      structure = graph, tree
    else:
      self._leaves, structure = [], None
    self._model = model  # keeps the shared function, too
    self._compiled = _shared(model, structure)

  def __call__(
    self,
    pages: pages_lib.Pages,
    arrays: step_lib.StepArrays,
    rows: sampling.SamplingRows,
  ) -> tuple[jax.Array, pages_lib.Pages]:
    """Runs one step.

    Args:
      pages: consumed.
      arrays: the step's batch.
      rows: how each of its sequences is sampled.

    Returns:
      int32 `[S]` drawn tokens, and the successor pages.
    """
    compiled = self._compiled
    before = compiled.traces
    try:
      return compiled.run(self._leaves, pages, arrays, rows)
    finally:
      self.compilations += compiled.traces - before


def _shared(model: Model, structure: Any) -> _Compiled:
  known = _compiled.get(model)
  if known is not None and known.structure == structure:
    return known
  reference = weakref.ref(model)  # the table's values must not keep its keys

  def run(
    leaves: list[jax.Array],
    pages: pages_lib.Pages,
    arrays: step_lib.StepArrays,
    rows: sampling.SamplingRows,
  ) -> tuple[jax.Array, pages_lib.Pages]:
    compiled.traces += 1  # runs when a new shape is traced, only then
    call = reference()
    assert call is not None  # whoever runs this holds the model
    if structure is not None:
      graph, tree = structure
      call = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    logits, pages = call(pages, arrays)
    # The new token's place is the number of rows before it.
    tokens = sampling.sample_tokens(logits, rows, arrays.context_lens)
    return tokens, pages

  compiled = _Compiled(structure, jax.jit(run, donate_argnums=1))
  _compiled[model] = compiled
  return compiled
