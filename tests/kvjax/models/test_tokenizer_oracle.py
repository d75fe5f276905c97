"""Tokenizers rebuilt from GGUF metadata agree with those they were made of."""

import inspect
import io
import json
import warnings

import pytest
from tokenizers import pre_tokenizers

from kvjax import models

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

_TEXTS = [
  "the cat sat on the mat",
  "  two  spaces ",
  "a naïve 日本語 🎉 tab\tand\nlines",
  "12345 words, repeated words",
  "",
  "▁already",
]


@pytest.fixture(scope="module")
def transformers():
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return pytest.importorskip("transformers")


def _rebuilt(write_tokenizer_gguf, path, pre):
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  file = write_tokenizer_gguf(
    path, [*alphabet, "ab"], pre=pre, token_merges=["a b"]
  )
  return json.loads(models.load_tokenizer(file).backend.to_str())


def test_qwen2_cuts_normalises_and_decodes_alike(
  tmp_path, transformers, write_tokenizer_gguf
):
  theirs = transformers.Qwen2Tokenizer(vocab={"a": 0, "b": 1}, merges=[])
  expected = json.loads(theirs.backend_tokenizer.to_str())
  ours = _rebuilt(write_tokenizer_gguf, tmp_path / "m.gguf", "qwen2")
  for key in ("normalizer", "pre_tokenizer", "decoder"):
    assert ours[key] == expected[key]


def test_llama3_cuts_alike(tmp_path, transformers, write_tokenizer_gguf):
  from transformers import convert_slow_tokenizer

  converter = convert_slow_tokenizer.TikTokenConverter
  pattern = inspect.signature(converter).parameters["pattern"].default
  ours = _rebuilt(write_tokenizer_gguf, tmp_path / "m.gguf", "llama-bpe")
  split = ours["pre_tokenizer"]["pretokenizers"][0]
  assert split["pattern"] == {"Regex": pattern}


def test_sentencepiece_encodes_and_decodes_alike(
  tmp_path, write_tokenizer_gguf
):
  sentencepiece = pytest.importorskip("sentencepiece")
  corpus = [
    "the cat sat on the mat and the dog ran to the barn",
    "hello world, this is a tiny corpus of words that repeat words",
  ]
  written = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(corpus * 20),
    model_writer=written,
    model_type="bpe",
    vocab_size=320,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    minloglevel=3,
  )
  theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
  ids = range(theirs.vocab_size())
  kinds = [
    3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in ids
  ]
  kinds[theirs.unk_id()] = 2
  file = write_tokenizer_gguf(
    tmp_path / "m.gguf",
    [theirs.id_to_piece(i) for i in ids],
    model="llama",
    kinds=kinds,
    token_scores=[theirs.get_score(i) for i in ids],
    bos_token_id=theirs.bos_id(),
  )
  ours = models.load_tokenizer(file)
  for text in _TEXTS:
    expected = theirs.encode(text)
    assert ours.encode(text) == [theirs.bos_id(), *expected]
    assert ours.decode(expected) == theirs.decode(expected)
