"""Token ids to text as they come: whole characters, and stop strings.

A stop string may begin in one token and end in another, so text is held back
for as long as it could still become one::

    stop "\\n\\n"       "Paris." -> emit    "\\n" -> hold    "\\n" -> stop
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"  # what half a character decodes to
_CONTEXT = 4  # prompt tokens that the first generated one is decoded with


class Decodes(Protocol):
  """The part of a tokenizer that turns ids into text."""

  def decode(self, ids: Sequence[int], /) -> str: ...


class StopStrings:
  """Finds the first of some strings in a text that comes in pieces.

  First means: the match that ends earliest, and of those the longest. So the
  answer does not depend on where the text was cut into pieces.

  Examples:
    >>> strings = StopStrings(["###"])
    >>> strings.push("a #"), strings.push("# b"), strings.push("###c")
    (('a ', False), ('## b', False), ('', True))
  """

  def __init__(self, strings: Iterable[str]):
    self._strings = tuple(strings)
    self._longest = max(map(len, self._strings), default=0)
    self._held = ""

  def push(self, piece: str) -> tuple[str, bool]:
    """Takes more text; returns the text that is safe, and whether to stop."""
    if not self._strings:
      return piece, False
    text = self._held + piece
    match = self._first_match(text)
    if match is not None:
      self._held = ""
      return text[:match], True
    held = self._length_held(text)
    self._held = text[len(text) - held :]
    return text[: len(text) - held], False

  def flush(self) -> str:
    """The text held back, which no stop string completed."""
    held, self._held = self._held, ""
    return held

  def _first_match(self, text: str) -> int | None:
    """Where the first match starts."""
    spans = []
    for string in self._strings:
      start = text.find(string)
      if start >= 0:
        spans.append((start + len(string), start))
    return min(spans)[1] if spans else None

  def _length_held(self, text: str) -> int:
    """The longest end of the text that begins some stop string."""
    for length in range(min(self._longest - 1, len(text)), 0, -1):
      end = text[len(text) - length :]
      if any(string.startswith(end) for string in self._strings):
        return length
    return 0


class TextStream:
  """The text of one sample, token by token.

  Only a window of the last tokens is decoded: from where the last whole
  characters began to the newest token. What the window's older part decodes
  to is taken off its front, which leaves the new text, spaces included.
  """

  def __init__(
    self,
    tokenizer: Decodes,
    prompt_tokens: Sequence[int],
    stop: Iterable[str] = (),
  ):
    self._tokenizer = tokenizer
    self._window = list(prompt_tokens[-_CONTEXT:])
    self._num_known = len(self._window)
    self._known = tokenizer.decode(self._window)
    self._stop = StopStrings(stop)

  def push(self, token: int) -> tuple[str, bool]:
    """Takes a token; returns the text now certain, and whether to stop."""
    self._window.append(token)
    text = self._tokenizer.decode(self._window)
    if len(text) <= len(self._known) or text.endswith(_REPLACEMENT):
      return "", False
    piece = text[len(self._known) :]
    del self._window[: self._num_known]
    self._num_known = len(self._window)
    self._known = self._tokenizer.decode(self._window)
    return self._stop.push(piece)

  def flush(self) -> str:
    """The text held back, at the end of the sample."""
    text = self._tokenizer.decode(self._window)
    piece, stopped = self._stop.push(text[len(self._known) :])
    self._known = text
    return piece if stopped else piece + self._stop.flush()
