"""Text to token ids and back: encoding, chat templates, streaming."""

import os
import pathlib
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tokenizers

from kvjax import errors
from kvjax.models import chat_template
from kvjax.models import config as config_lib
from kvjax.models import gguf_file
from kvjax.models import gguf_tokenizer

_REPLACEMENT = "\ufffd"


class Tokenizer:
  """A checkpoint's tokenizer.

  Attributes:
    backend: What encodes and decodes, of the package `tokenizers`.
    eos_ids: Tokens that end a text or a turn.
    bos_token: The text of the token that begins every prompt, or None.
    vocab_size: Token ids run below it.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    eos_ids: Iterable[int] = (),
    bos_token: str | None = None,
    eos_token: str | None = None,
    template: str | None = None,
  ):
    """Wraps a backend.

    Args:
      backend: What encodes and decodes.
      eos_ids: Tokens that end a text or a turn.
      bos_token: Text of the token that begins a prompt.
      eos_token: Text of the token that ends one.
      template: The chat template, in Jinja.
    """
    self.backend = backend
    self._template = template
    self._render: chat_template.ChatTemplate | None = None
    self._eos_token = eos_token
    self.bos_token = bos_token
    self.eos_ids = tuple(dict.fromkeys(eos_ids))
    self.vocab_size = backend.get_vocab_size()

  def encode(self, text: str) -> list[int]:
    """Token ids of a prompt.

    Names of special tokens within the text become those tokens. A text that
    already begins with BOS, as chats may, gets no second one.
    """
    begun = self.bos_token is not None and text.startswith(self.bos_token)
    return self.backend.encode(text, add_special_tokens=not begun).ids

  def decode(self, ids: Sequence[int]) -> str:
    """The text of token ids, without the special ones."""
    return self.backend.decode(list(ids), skip_special_tokens=True)

  def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt of a conversation, up to where the assistant speaks.

    Args:
      messages: Turns, as `{"role": "user", "content": "..."}`.

    Returns:
      A text to `encode`.

    Raises:
      BadRequest: There is no template, or it refuses these messages.
      CheckpointError: The template is not valid Jinja.
    """
    if self._template is None:
      raise errors.BadRequest("this tokenizer has no chat template")
    if self._render is None:
      self._render = chat_template.ChatTemplate(self._template)
    return self._render(
      messages, bos_token=self.bos_token or "", eos_token=self._eos_token or ""
    )

  def stream(self) -> "StreamDecoder":
    """A decoder for the ids of one text as they come."""
    return StreamDecoder(self)


class StreamDecoder:
  """Text of token ids that come one by one, in whole characters only.

  The pieces it returns, joined, are the text of all ids. A character whose
  bytes are spread over several tokens comes out with the last of them.

  Example:
    stream = tokenizer.stream()
    for token in tokens:
      print(stream.push(token), end="")
    print(stream.finish())
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    # The tokens since the last clean cut, and how much of their text is out.
    self._ids: list[int] = []
    self._emitted = 0

  def push(self, token: int) -> str:
    """The text that one more token settles; often empty mid-character."""
    self._ids.append(token)
    text = self._tokenizer.decode(self._ids)
    settled = text.rstrip(_REPLACEMENT)
    piece = settled[self._emitted :]
    self._emitted = max(self._emitted, len(settled))
    if piece and settled == text:
      # The last token stays: what follows may depend on it (spaces).
      self._ids = self._ids[-1:]
      self._emitted = len(self._tokenizer.decode(self._ids))
    return piece

  def finish(self) -> str:
    """What is left, with a replacement character for half a one."""
    piece = self._tokenizer.decode(self._ids)[self._emitted :]
    self._ids, self._emitted = [], 0
    return piece


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
  """Loads a checkpoint's tokenizer.

  Args:
    path: A folder with tokenizer.json (and tokenizer_config.json), or a GGUF
      file, whose tokenizer is rebuilt from its metadata.

  Returns:
    The tokenizer.

  Raises:
    CheckpointError: A file is missing or damaged.
    UnsupportedCheckpoint: The GGUF file's tokenizer is of another kind.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return _from_folder(path)
  file = gguf_file.read(path)
  bos, eos = (gguf_tokenizer.token_text(file, key) for key in ("bos", "eos"))
  return Tokenizer(
    gguf_tokenizer.build(file),
    eos_ids=gguf_tokenizer.eos_ids(file),
    bos_token=bos,
    eos_token=eos,
    template=file.get("tokenizer.chat_template", str),
  )


def _from_folder(folder: pathlib.Path) -> Tokenizer:
  file = folder / "tokenizer.json"
  if not file.exists():
    raise errors.CheckpointError(f"{file}: no such file")
  try:
    backend = tokenizers.Tokenizer.from_file(str(file))
  except Exception as error:  # The package raises nothing narrower.
    raise errors.CheckpointError(f"{file}: {error}") from error
  settings = _optional_json(folder / "tokenizer_config.json")
  eos_token = _token_text(settings.get("eos_token"))
  eos_ids = [
    token
    for name in ("generation_config.json", "config.json")
    for token in config_lib.token_ids(
      _optional_json(folder / name).get("eos_token_id")
    )
  ]
  eos_id = None if eos_token is None else backend.token_to_id(eos_token)
  if eos_id is not None:
    eos_ids.append(eos_id)
  return Tokenizer(
    backend,
    eos_ids=eos_ids,
    bos_token=_token_text(settings.get("bos_token")),
    eos_token=eos_token,
    template=_template(folder, settings),
  )


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
  """The chat template: a file of its own, a string, or the default of a list."""
  file = folder / "chat_template.jinja"
  if file.exists():
    return file.read_text(encoding="utf-8")
  template = settings.get("chat_template")
  if isinstance(template, list):
    named = {entry["name"]: entry["template"] for entry in template}
    return named.get("default")
  return template


def _optional_json(path: pathlib.Path) -> dict[str, Any]:
  return config_lib.read_json(path) if path.exists() else {}


def _token_text(token: str | Mapping[str, Any] | None) -> str | None:
  """A token of tokenizer_config.json: its text, or an object that holds it."""
  return token["content"] if isinstance(token, Mapping) else token
