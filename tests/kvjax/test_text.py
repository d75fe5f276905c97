"""Text comes in whole characters, and never shows part of a stop string."""

import itertools
import random

import pytest

from kvjax import text


class ByteTokenizer:
  """One token per byte; half a character decodes to U+FFFD."""

  def decode(self, ids):
    return bytes(ids).decode("utf-8", errors="replace")


class WordTokenizer:
  """Drops the space before the first word, as SentencePiece does."""

  def __init__(self, words):
    self.words = words

  def decode(self, ids):
    return "".join(self.words[i] for i in ids).removeprefix(" ")


def streamed(string, stop=(), context=b"The "):
  """The pieces that come out for a string fed byte by byte."""
  stream = text.TextStream(ByteTokenizer(), list(context), stop)
  pieces = []
  for byte in string.encode():
    piece, stopped = stream.push(byte)
    pieces.append(piece)
    if stopped:
      break
  pieces.append(stream.flush())
  return pieces


def earliest_end(string, stops):
  """The text before the stop string that ends first: letter by letter."""
  for end in range(len(string) + 1):
    for start in range(end):
      if string[start:end] in stops:
        return string[:start]
  return string


@pytest.mark.parametrize("string", ["plain", "naïve café", "日本語", "👩‍🚀 up"])
def test_text_is_exact_and_no_piece_has_half_a_character(string):
  pieces = streamed(string)
  assert "".join(pieces) == string
  assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_at_the_end_is_shown_as_what_it_decodes_to():
  stream = text.TextStream(ByteTokenizer(), [])
  assert stream.push("é".encode()[0]) == ("", False)
  assert stream.flush() == "\ufffd"


def test_a_prompt_that_ends_in_half_a_character_does_not_lose_text():
  half, rest = "é".encode()
  stream = text.TextStream(ByteTokenizer(), [half])
  pieces = [stream.push(rest)[0], stream.push(ord("x"))[0], stream.flush()]
  assert "".join(pieces).endswith("x")


def test_spaces_between_words_survive_tokenizers_that_strip_the_first():
  tokenizer = WordTokenizer([" a", " b", " c"])
  stream = text.TextStream(tokenizer, [0])
  assert [stream.push(i)[0] for i in (1, 2, 0)] == [" b", " c", " a"]


def test_a_stop_string_over_many_tokens_is_never_shown():
  pieces = streamed("one STOP two", stop=["STOP"])
  assert "".join(pieces) == "one "


def test_text_that_only_looked_like_a_stop_string_comes_late_but_whole():
  stream = text.TextStream(ByteTokenizer(), [], ["##!"])
  shown = [stream.push(b)[0] for b in b"a##b"]
  assert shown == ["a", "", "", "##b"]
  assert stream.push(ord("#")) == ("", False)
  assert stream.flush() == "#"


def test_the_end_of_the_text_releases_what_was_held_back():
  assert "".join(streamed("tail #", stop=["##"])) == "tail #"


def test_the_first_stop_string_to_end_wins_however_the_text_is_cut():
  rng = random.Random(0)
  alphabet = "ab"
  stops_of = [
    list(pair)
    for pair in itertools.product(("ab", "aab", "bb", "abab", "b"), repeat=2)
  ]
  for stops in stops_of:
    for _ in range(40):
      string = "".join(rng.choices(alphabet, k=rng.randrange(12)))
      finder = text.StopStrings(stops)
      shown, position = "", 0
      while position < len(string):
        size = rng.randint(1, 4)
        piece, stopped = finder.push(string[position : position + size])
        shown += piece
        position += size
        if stopped:
          break
      else:
        shown += finder.flush()
      assert shown == earliest_end(string, stops)


def test_no_stop_strings_hold_nothing_back():
  assert text.StopStrings(()).push("anything") == ("anything", False)
