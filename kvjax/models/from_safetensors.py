"""Tensors of a folder with model.safetensors, or its shards and an index."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors

from kvjax import errors
from kvjax.models import config as config_lib
from kvjax.models import weights

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder:
  """The tensors of one folder, read as they are asked for."""

  def __init__(self, folder: pathlib.Path):
    """Opens the files and reads the shapes.

    Args:
      folder: Where model.safetensors or its index is.

    Raises:
      CheckpointError: A file is missing or damaged.
      UnsupportedCheckpoint: There are no safetensors, or tensors are not
        floating-point numbers.
    """
    index = folder / _INDEX
    if index.exists():
      self._main = index
      files = _read_index(index)
      handles = {path: _open(path) for path in sorted(set(files.values()))}
    else:
      self._main = _single_file(folder)
      handles = {self._main: _open(self._main)}
      files = dict.fromkeys(handles[self._main].keys(), self._main)
    self._handles = {name: handles[path] for name, path in files.items()}
    self._files = files
    self._shapes = {name: self._shape(name) for name in files}

  def shapes(self) -> Mapping[str, weights.Shape]:
    """Shapes by name."""
    return self._shapes

  def file_of(self, name: str) -> str:
    """The file that holds a tensor; the index, or the only file, if none."""
    return str(self._files.get(name, self._main))

  def read(self, name: str) -> np.ndarray:
    """One tensor, in the dtype it is stored in."""
    return self._handles[name].get_tensor(name)

  def _shape(self, name: str) -> weights.Shape:
    try:
      view = self._handles[name].get_slice(name)
    except safetensors.SafetensorError as error:
      raise errors.CheckpointError(
        f"{self.file_of(name)}: tensor {name} is named in {self._main.name} "
        "and missing here"
      ) from error
    if view.get_dtype() not in _FLOATS:
      raise errors.UnsupportedCheckpoint(
        f"{self.file_of(name)}: tensor {name} is {view.get_dtype()}, none of "
        f"{_FLOATS}"
      )
    return tuple(view.get_shape())


def _single_file(folder: pathlib.Path) -> pathlib.Path:
  if (folder / _SINGLE).exists():
    return folder / _SINGLE
  if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
    raise errors.UnsupportedCheckpoint(
      f"{folder}: PyTorch pickles are not read; save it as safetensors"
    )
  raise errors.CheckpointError(f"{folder}: neither {_SINGLE} nor {_INDEX}")


def _read_index(index: pathlib.Path) -> dict[str, pathlib.Path]:
  weight_map = config_lib.read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise errors.CheckpointError(f"{index}: no weight_map")
  for name, file in weight_map.items():
    if not isinstance(file, str) or pathlib.PurePath(file).name != file:
      raise errors.CheckpointError(
        f"{index}: tensor {name} is said to be in {file!r}, no file name"
      )
  return {name: index.parent / file for name, file in weight_map.items()}


def _open(path: pathlib.Path) -> Any:
  try:
    return safetensors.safe_open(path, framework="numpy")
  except (safetensors.SafetensorError, OSError) as error:
    raise errors.CheckpointError(f"{path}: {error}") from error
