"""A GGUF file: its metadata and tensors, parsed once for all who ask.

The header is walked here and not by gguf's reader, which believes every count
that it reads: one damaged byte makes it loop until memory runs out. What the
bytes of a tensor mean is gguf's to say.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any
from typing import NoReturn

import gguf
import numpy as np

from kvjax import errors

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_AXES = 4
_STRING = gguf.GGUFValueType.STRING
_ARRAY = gguf.GGUFValueType.ARRAY
_NUMBERS = {
  gguf.GGUFValueType.UINT8: "<u1",
  gguf.GGUFValueType.INT8: "<i1",
  gguf.GGUFValueType.UINT16: "<u2",
  gguf.GGUFValueType.INT16: "<i2",
  gguf.GGUFValueType.UINT32: "<u4",
  gguf.GGUFValueType.INT32: "<i4",
  gguf.GGUFValueType.FLOAT32: "<f4",
  gguf.GGUFValueType.BOOL: "?",
  gguf.GGUFValueType.UINT64: "<u8",
  gguf.GGUFValueType.INT64: "<i8",
  gguf.GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
  """Where one tensor lies.

  Attributes:
    shape: Sizes, slowest axis first.
    kind: How its numbers are stored.
    begin: Byte of the file where it begins.
    row_bytes: Bytes of its fastest axis.
  """

  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  begin: int
  row_bytes: int

  @property
  def end(self) -> int:
    """The byte after its last."""
    return self.begin + math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """A parsed file; the tensors' bytes stay on disk, memory-mapped.

  Attributes:
    path: Where it is.
    metadata: Key to value: numbers, strings and lists of them.
    tensors: The tensors by their GGUF names.
    content: uint8, the whole file.
  """

  path: pathlib.Path
  metadata: Mapping[str, Any]
  tensors: Mapping[str, GgufTensor]
  content: np.ndarray

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

  def read(self, name: str) -> np.ndarray:
    """One tensor, dequantised to float32.

    Args:
      name: Its GGUF name.

    Raises:
      UnsupportedCheckpoint: It has a quantisation that gguf cannot undo.
    """
    tensor = self.tensors[name]
    stored = self.content[tensor.begin : tensor.end]
    try:
      values = gguf.quants.dequantize(
        stored.reshape(-1, tensor.row_bytes), tensor.kind
      )
    except NotImplementedError as error:
      raise errors.UnsupportedCheckpoint(
        f"{self.path}: tensor {name}: {tensor.kind.name} cannot be dequantised"
      ) from error
    # A copy: float32 would be a view of the file, for as long as it lives.
    return np.array(values.reshape(tensor.shape))


def read(path: pathlib.Path) -> GgufFile:
  """Parses a GGUF file, or finds it parsed already.

  Args:
    path: The file.

  Returns:
    Its metadata and tensors.

  Raises:
    CheckpointError: There is no such file, or it is damaged.
    UnsupportedCheckpoint: It is of another version, byte order or tensor type.
  """
  try:
    status = path.stat()
  except OSError as error:
    raise errors.CheckpointError(f"{path}: {error.strerror}") from error
  return _parse(path.resolve(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def _parse(path: pathlib.Path, _mtime_ns: int, size: int) -> GgufFile:
  if size == 0:
    raise errors.CheckpointError(f"{path}: not a whole GGUF file: it is empty")
  content = np.memmap(path, mode="r", dtype=np.uint8)
  cursor = _Cursor(path, content)
  num_tensors, num_keys = _header(cursor)
  metadata = {}
  for _ in range(num_keys):
    key = cursor.string()
    if key in metadata:
      cursor.fail(f"{key} is there twice")
    metadata[key] = cursor.value()
  tensors = _tensors(cursor, num_tensors, metadata)
  return GgufFile(path, metadata, tensors, content)


def _header(cursor: "_Cursor") -> tuple[int, int]:
  """Numbers of tensors and of metadata keys."""
  if cursor.take(4) != _MAGIC:
    cursor.fail("this is no GGUF file")
  version = cursor.u32()
  if version not in _VERSIONS:
    raise errors.UnsupportedCheckpoint(
      f"{cursor.path}: GGUF version {version} is none of {_VERSIONS}"
    )
  return cursor.u64(), cursor.u64()


def _tensors(
  cursor: "_Cursor", count: int, metadata: Mapping[str, Any]
) -> dict[str, GgufTensor]:
  found = {}
  for _ in range(count):
    name = cursor.string()
    if name in found:
      cursor.fail(f"tensor {name} is there twice")
    found[name] = _tensor(cursor, name)
  alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
  if not isinstance(alignment, int) or alignment < 1:
    cursor.fail(f"general.alignment is {alignment!r}")
  start = -(-cursor.at // alignment) * alignment
  tensors = {}
  for name, tensor in found.items():
    tensor = dataclasses.replace(tensor, begin=start + tensor.begin)
    if tensor.end > cursor.content.size:
      cursor.fail(
        f"tensor {name} ends at byte {tensor.end} of {cursor.content.size}"
      )
    tensors[name] = tensor
  return tensors


def _tensor(cursor: "_Cursor", name: str) -> GgufTensor:
  """One tensor's entry; `begin` counts from the start of the tensors yet."""
  num_axes = cursor.u32()
  if not 1 <= num_axes <= _MOST_AXES:
    cursor.fail(f"tensor {name} has {num_axes} axes")
  shape = tuple(cursor.u64() for _ in range(num_axes))[::-1]
  code = cursor.u32()
  try:
    kind = gguf.GGMLQuantizationType(code)
  except ValueError as error:
    raise errors.UnsupportedCheckpoint(
      f"{cursor.path}: tensor {name} is of unknown type {code}"
    ) from error
  block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
  if shape[-1] % block or 0 in shape:
    cursor.fail(f"tensor {name} of shape {shape} is not in blocks of {block}")
  row_bytes = shape[-1] // block * block_bytes
  return GgufTensor(shape, kind, cursor.u64(), row_bytes)


class _Cursor:
  """A place in a file that is never read past its end."""

  def __init__(self, path: pathlib.Path, content: np.ndarray):
    self.path = path
    self.content = content
    self.at = 0
    self._bytes = content.data

  def fail(self, what: str) -> NoReturn:
    """Raises `CheckpointError` with the file and the place."""
    raise errors.CheckpointError(
      f"{self.path}: not a whole GGUF file: {what} (byte {self.at})"
    )

  def take(self, count: int) -> bytes:
    """The next bytes."""
    end = self.at + count
    if end > len(self._bytes):
      self.fail(f"{count} more bytes are missing from the end")
    taken = bytes(self._bytes[self.at : end])
    self.at = end
    return taken

  def u32(self) -> int:
    """The next number of 4 bytes."""
    return int.from_bytes(self.take(4), "little")

  def u64(self) -> int:
    """The next number of 8 bytes."""
    return int.from_bytes(self.take(8), "little")

  def string(self) -> str:
    """The next string."""
    length = self.u64()
    try:
      return self.take(length).decode("utf-8")
    except UnicodeDecodeError:
      self.fail("a string is not UTF-8")

  def value(self) -> Any:
    """The next metadata value, after its type."""
    kind = self.u32()
    if kind != _ARRAY:
      (value,) = self._values(kind, 1)
      return value
    kind = self.u32()
    return self._values(kind, self.u64())

  def _values(self, kind: int, count: int) -> list[Any]:
    if kind == _STRING:
      # A string takes 8 bytes or more, so a wrong count soon runs out.
      return [self.string() for _ in range(count)]
    if kind not in _NUMBERS:
      self.fail(f"a value of type {kind}")
    dtype = np.dtype(_NUMBERS[gguf.GGUFValueType(kind)])
    return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
