"""Decoders in flax.nnx, their checkpoints and their tokenizers."""

from kvjax.errors import CheckpointError
from kvjax.errors import UnsupportedCheckpoint
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.loading import load
from kvjax.models.loading import smollm2_gguf

__all__ = [
  "CheckpointError",
  "Decoder",
  "DecoderConfig",
  "UnsupportedCheckpoint",
  "load",
  "smollm2_gguf",
]
