"""A GGUF file: its metadata and tensors, parsed once for all who ask."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from kvjax import errors


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """A parsed file; the tensors' bytes stay on disk, memory-mapped.

  Attributes:
    path: Where it is.
    metadata: Key to value: numbers, strings and lists of them.
    tensors: The reader's tensors by their GGUF names.
  """

  path: pathlib.Path
  metadata: Mapping[str, Any]
  tensors: Mapping[str, Any]

  def get(self, key: str, kind: type, default: Any = None) -> Any:
    """A metadata value of a known type, or the default where there is none.

    Args:
      key: The key.
      kind: Its type; int will do where float is asked for.
      default: What a missing key gives.

    Raises:
      CheckpointError: The value is of another type.
    """
    value = self.metadata.get(key)
    if value is None:
      return default
    if kind is float and isinstance(value, int):
      return float(value)
    if not isinstance(value, kind):
      raise errors.CheckpointError(
        f"{self.path}: {key} is {value!r}, expected {kind.__name__}"
      )
    return value

  def need(self, key: str, kind: type) -> Any:
    """As `get`, for a key that must be there.

    Raises:
      CheckpointError: There is no such key, or its value has another type.
    """
    value = self.get(key, kind)
    if value is None:
      raise errors.CheckpointError(f"{self.path}: no {key}")
    return value

  def shape(self, name: str) -> tuple[int, ...]:
    """A tensor's shape, slowest axis first."""
    return tuple(int(size) for size in reversed(self.tensors[name].shape))

  def read(self, name: str) -> np.ndarray:
    """One tensor, dequantised to float32.

    Args:
      name: Its GGUF name.

    Raises:
      UnsupportedCheckpoint: It has a quantisation that gguf cannot undo.
    """
    tensor = self.tensors[name]
    try:
      values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise errors.UnsupportedCheckpoint(
        f"{self.path}: tensor {name}: quantisation "
        f"{tensor.tensor_type.name} is not supported"
      ) from error
    return values.reshape(self.shape(name))


def read(path: pathlib.Path) -> GgufFile:
  """Parses a GGUF file, or finds it parsed already.

  Args:
    path: The file.

  Returns:
    Its metadata and tensors.

  Raises:
    CheckpointError: There is no such file, or it is damaged.
  """
  try:
    status = path.stat()
  except OSError as error:
    raise errors.CheckpointError(f"{path}: {error.strerror}") from error
  return _parse(path.resolve(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def _parse(path: pathlib.Path, _mtime_ns: int, _size: int) -> GgufFile:
  # The reader slices a memory map, so damage shows as all sorts of errors.
  try:
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
  except (ValueError, LookupError, ArithmeticError, OSError) as error:
    raise errors.CheckpointError(
      f"{path}: not a whole GGUF file: {error}"
    ) from error
  return GgufFile(path, metadata, tensors)
