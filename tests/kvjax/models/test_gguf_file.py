"""Our walk of a GGUF file finds what gguf's reader finds, and stops in time."""

import gguf
import numpy as np
import pytest

from kvjax import errors
from kvjax import testing
from kvjax.models import from_gguf
from kvjax.models import gguf_file
from kvjax.models import weights

_KINDS = gguf.GGMLQuantizationType


@pytest.fixture
def rich_file(tmp_path):
  """Values of every type and tensors of several."""
  path = tmp_path / "rich.gguf"
  writer = gguf.GGUFWriter(path, "llama")
  for bits in (8, 16, 32, 64):
    getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
    getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
  writer.add_float32("f32", 0.1)
  writer.add_float64("f64", 0.1)
  writer.add_bool("yes", True)
  writer.add_string("text", "é🎉")
  writer.add_array("numbers", [1, -2, 3])
  writer.add_array("floats", [0.5, 0.25])
  writer.add_array("texts", ["a", "", "é"])
  rng = np.random.default_rng(0)
  values = rng.standard_normal((3, 64)).astype(np.float32)
  for kind in (_KINDS.F32, _KINDS.F16, _KINDS.BF16, _KINDS.Q8_0, _KINDS.Q4_1):
    data = gguf.quants.quantize(values, kind)
    writer.add_tensor(kind.name, data, raw_dtype=kind)
  writer.add_tensor("vector", values[0])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path, values


def test_metadata_and_tensors_are_those_of_the_reference_reader(rich_file):
  path, values = rich_file
  reader = gguf.GGUFReader(path)
  ours = gguf_file.read(path)
  assert ours.metadata == {
    key: field.contents()
    for key, field in reader.fields.items()
    if not key.startswith("GGUF.")
  }
  assert list(ours.tensors) == [tensor.name for tensor in reader.tensors]
  for tensor in reader.tensors:
    np.testing.assert_array_equal(
      ours.read(tensor.name),
      gguf.quants.dequantize(tensor.data, tensor.tensor_type),
    )
  np.testing.assert_array_equal(ours.read("F32"), values)
  np.testing.assert_allclose(ours.read("Q4_1"), values, atol=0.2)


def test_a_file_is_parsed_once_until_it_changes(rich_file):
  path, _ = rich_file
  first = gguf_file.read(path)
  assert gguf_file.read(path) is first
  path.write_bytes(path.read_bytes() + b"\0")
  assert gguf_file.read(path) is not first


@pytest.mark.parametrize("seed", range(3))
def test_any_damaged_byte_ends_in_a_typed_error_or_a_sound_file(
  tmp_path, checkpoint, seed
):
  config = testing.tiny_config("qwen2", num_layers=1, vocab_size=8)
  path = checkpoint(config).write_gguf(tmp_path / "model.gguf")
  whole = path.read_bytes()
  header = gguf.GGUFReader(path).data_offset
  rng = np.random.default_rng(seed)
  refusals = []
  for _ in range(100):
    damaged = bytearray(whole)
    for at in rng.integers(0, header, rng.integers(1, 4)):
      damaged[at] = rng.choice([0, 1, 255, rng.integers(256)])
    path.write_bytes(damaged)
    gguf_file._parse.cache_clear()  # The clock may be too coarse to tell.
    try:
      file = gguf_file.read(path)
      read = from_gguf.read_config(file)
      weights.check_tensors(read, from_gguf.GgufTensors(file, read))
    except errors.KVError as error:
      refusals.append(str(error))
  assert len(refusals) > 20
  assert all("model.gguf: " in message for message in refusals)


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    ({0: b"GGML"}, errors.CheckpointError, "this is no GGUF file"),
    ({4: b"\x00\x00\x00\x03"}, errors.UnsupportedCheckpoint, "GGUF version"),
    ({16: b"\xff" * 8}, errors.CheckpointError, "missing from the end"),
    ({24: b"\xff" * 7}, errors.CheckpointError, "missing from the end"),
    ({32: b"\xff"}, errors.CheckpointError, "a string is not UTF-8"),
  ],
)
def test_the_place_of_the_damage_is_told(rich_file, change, error, message):
  path, _ = rich_file
  content = bytearray(path.read_bytes())
  for at, replacement in change.items():
    content[at : at + len(replacement)] = replacement
  path.write_bytes(content)
  with pytest.raises(error, match=rf"rich\.gguf: .*{message}"):
    gguf_file.read(path)


def test_what_gguf_cannot_dequantise_is_refused_by_name(tmp_path):
  path = tmp_path / "model.gguf"
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_tensor("counts", np.arange(4, dtype=np.int32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  file = gguf_file.read(path)
  with pytest.raises(errors.UnsupportedCheckpoint, match="counts: I32 cannot"):
    file.read("counts")
