"""Decoders in flax.nnx, their checkpoints and their tokenizers."""

from kvjax.errors import CheckpointError
from kvjax.errors import UnsupportedCheckpoint
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.loading import load
from kvjax.models.loading import smollm2_gguf
from kvjax.models.tokenizer import load_tokenizer
from kvjax.models.tokenizer import StreamDecoder
from kvjax.models.tokenizer import Tokenizer

__all__ = [
  "CheckpointError",
  "Decoder",
  "DecoderConfig",
  "StreamDecoder",
  "Tokenizer",
  "UnsupportedCheckpoint",
  "load",
  "load_tokenizer",
  "smollm2_gguf",
]
