"""Rebuilds a tokenizer from a GGUF file's metadata."""

import enum
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from kvjax import errors
from kvjax.models import gguf_file

_KEYS = "tokenizer.ggml."
# How the families cut text into words, by the name that GGUF gives the way.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
  r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _WORDS.format(digits=r"\p{N}{1,3}")
_QWEN2_WORDS = _WORDS.format(digits=r"\p{N}")
_SPACE = "\u2581"  # SentencePiece's visible space.


class _Kind(enum.IntEnum):
  """Token types, as GGUF counts them."""

  UNKNOWN = 2
  CONTROL = 3
  USER_DEFINED = 4


def build(file: gguf_file.GgufFile) -> tokenizers.Tokenizer:
  """Rebuilds the tokenizer.

  Args:
    file: The parsed file.

  Returns:
    A tokenizer that encodes and decodes as the model's own.

  Raises:
    CheckpointError: The metadata is missing or contradicts itself.
    UnsupportedCheckpoint: It is neither byte-level BPE of a known kind nor
      SentencePiece BPE.
  """
  tokens = file.need(f"{_KEYS}tokens", list)
  kinds = file.get(f"{_KEYS}token_type", list, [1] * len(tokens))
  if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
    raise errors.CheckpointError(
      f"{file.path}: {len(tokens)} tokens, {len(set(tokens))} of them "
      f"distinct, and {len(kinds)} token types"
    )
  model = file.need(f"{_KEYS}model", str)
  if model == "gpt2":
    tokenizer = _byte_level(file, tokens)
  elif model == "llama":
    tokenizer = _sentencepiece(file, tokens)
  else:
    raise errors.UnsupportedCheckpoint(
      f"{file.path}: tokenizer model {model!r} is neither 'gpt2' nor 'llama'"
    )
  _add_special_tokens(tokenizer, tokens, kinds)
  _add_bos(tokenizer, file)
  return tokenizer


def token_text(file: gguf_file.GgufFile, role: str) -> str | None:
  """The text of the file's token of a role ("bos", "eos"), or None.

  Raises:
    CheckpointError: Its id is not in the vocabulary.
  """
  token = file.get(f"{_KEYS}{role}_token_id", int)
  if token is None:
    return None
  tokens = file.need(f"{_KEYS}tokens", list)
  if not 0 <= token < len(tokens):
    raise errors.CheckpointError(
      f"{file.path}: {role} token {token} of {len(tokens)}"
    )
  return tokens[token]


def eos_ids(file: gguf_file.GgufFile) -> tuple[int, ...]:
  """The tokens that end a text or a turn, in that order, each once."""
  found = (
    file.get(f"{_KEYS}{role}_token_id", int) for role in ("eos", "eot", "eom")
  )
  return tuple(dict.fromkeys(token for token in found if token is not None))


def _byte_level(
  file: gguf_file.GgufFile, tokens: Sequence[str]
) -> tokenizers.Tokenizer:
  kind = file.get(f"{_KEYS}pre", str, "default")
  merges = [
    tuple(merge.split(" ", 1)) for merge in file.need(f"{_KEYS}merges", list)
  ]
  vocab = {token: index for index, token in enumerate(tokens)}
  try:
    bpe = models.BPE(vocab, merges, ignore_merges=kind == "llama-bpe")
  except Exception as error:  # The package raises nothing narrower.
    raise errors.CheckpointError(f"{file.path}: merges: {error}") from error
  tokenizer = tokenizers.Tokenizer(bpe)
  tokenizer.pre_tokenizer = _word_splitter(file, kind)
  tokenizer.decoder = decoders.ByteLevel()
  if kind == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  return tokenizer


def _word_splitter(
  file: gguf_file.GgufFile, kind: str
) -> pre_tokenizers.PreTokenizer:
  whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  if kind in ("default", "gpt-2"):
    return whole
  if kind == "smollm":
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, whole])
  words = {"llama-bpe": _LLAMA3_WORDS, "qwen2": _QWEN2_WORDS}.get(kind)
  if words is None:
    raise errors.UnsupportedCheckpoint(
      f"{file.path}: pre-tokenizer {kind!r} is none of 'default', 'gpt-2', "
      "'llama-bpe', 'qwen2', 'smollm'; load the tokenizer from a folder with "
      "tokenizer.json"
    )
  split = pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated")
  return pre_tokenizers.Sequence([split, bytes_only])


def _sentencepiece(
  file: gguf_file.GgufFile, tokens: Sequence[str]
) -> tokenizers.Tokenizer:
  """BPE whose merges are implied by the scores of the pieces."""
  scores = file.need(f"{_KEYS}scores", list)
  if len(scores) != len(tokens):
    raise errors.CheckpointError(
      f"{file.path}: {len(tokens)} tokens and {len(scores)} scores"
    )
  vocab = {token: index for index, token in enumerate(tokens)}
  merges = [
    (score, (piece[:cut], piece[cut:]))
    for piece, score in zip(tokens, scores, strict=True)
    for cut in range(1, len(piece))
    if piece[:cut] in vocab and piece[cut:] in vocab
  ]
  merges.sort(key=lambda merge: -merge[0])
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      vocab,
      [pair for _, pair in merges],
      unk_token=token_text(file, "unknown") or tokens[0],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  prefix = file.get(f"{_KEYS}add_space_prefix", bool, True)
  visible_spaces = normalizers.Replace(" ", _SPACE)
  tokenizer.normalizer = (
    normalizers.Sequence([normalizers.Prepend(_SPACE), visible_spaces])
    if prefix
    else visible_spaces
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace(_SPACE, " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", int(prefix), 0),
    ]
  )
  return tokenizer


def _add_special_tokens(
  tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
  def of(*wanted: _Kind) -> list[tokenizers.AddedToken]:
    special = _Kind.CONTROL in wanted
    return [
      tokenizers.AddedToken(token, normalized=False, special=special)
      for token, kind in zip(tokens, kinds, strict=True)
      if kind in wanted
    ]

  tokenizer.add_special_tokens(of(_Kind.CONTROL, _Kind.UNKNOWN))
  tokenizer.add_tokens(of(_Kind.USER_DEFINED))


def _add_bos(tokenizer: tokenizers.Tokenizer, file: gguf_file.GgufFile) -> None:
  """Makes `encode` begin with BOS where the model expects it."""
  bos = token_text(file, "bos")
  expected = (
    file.get(f"{_KEYS}model", str) == "llama"
    or file.get(f"{_KEYS}pre", str) == "llama-bpe"
  )
  if bos is None or not file.get(f"{_KEYS}add_bos_token", bool, expected):
    return
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
  )
