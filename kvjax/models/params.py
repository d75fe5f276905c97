"""A module as a dict of named arrays, and back: what jit is quickest with."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def split(
  module: nnx.Module,
) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
  """Splits a module once, outside the functions that are jitted.

  Args:
    module: Any module; what `nnx.eval_shape` makes of one will do.

  Returns:
    `(merge, params)`: `merge(params)` is the module again, and `params` maps
    names such as "layers.0.qkv.kernel" to the module's own arrays.
  """
  graphdef, state = nnx.split(module)
  paths, treedef = jax.tree_util.tree_flatten_with_path(state)
  names = [
    jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(
      ".value"
    )
    for path, _ in paths
  ]

  def merge(params: dict[str, Any]) -> Any:
    leaves = [params[name] for name in names]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

  return merge, dict(zip(names, (leaf for _, leaf in paths), strict=True))
