"""Tokenizers from folders and GGUF files; chats; whole characters."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import pre_tokenizers

from kvjax import errors
from kvjax import models
from kvjax import testing
from kvjax.models import tokenizer as tokenizer_lib

_TEXT = (
  "Hello, World! It's 2,345.67 naïve\tcafés — 日本語 and 🎉🎉👨‍👩‍👧\n\n  def f(x):\n"
  "    return x**2  # we'll see\r\n"
)


def _byte_backend(**special):
  """A tokenizer whose tokens are the 256 bytes, in the alphabet's order."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {character: index for index, character in enumerate(alphabet)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(list(special.values()))
  return backend


@pytest.fixture
def sentencepiece_gguf(tmp_path, write_tokenizer_gguf):
  """Bytes and a few pieces, with the scores that order their merges."""
  pieces = ["<unk>", "<s>", "</s>"]
  pieces += [f"<0x{byte:02X}>" for byte in range(256)]
  words = ["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "ba"]
  scores = [0.0] * len(pieces) + [-1e9, -1e9, -1e9, -0.0, -3.0, -1.0, -2.0]
  return write_tokenizer_gguf(
    tmp_path / "m.gguf",
    pieces + words,
    model="llama",
    kinds=[2, 3, 3] + [6] * 256 + [1] * 7,
    token_scores=scores,
    bos_token_id=1,
    eos_token_id=2,
  )


class TestSmolLM2:
  def test_the_rebuilt_tokenizer_is_the_published_one(self):
    _, ours = testing.smollm2()
    path = testing.data_path("smollm2/tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(path))
    assert json.loads(ours.backend.to_str()) == json.loads(theirs.to_str())
    assert ours.vocab_size == 49152
    for text in (_TEXT, "", " ", "<|im_start|>user\n<|im_end|>"):
      assert ours.encode(text) == theirs.encode(text).ids

  def test_text_survives_the_round_trip(self):
    _, tokenizer = testing.smollm2()
    assert tokenizer.decode(tokenizer.encode(_TEXT)) == _TEXT

  def test_special_tokens_are_not_text(self):
    _, tokenizer = testing.smollm2()
    assert (
      tokenizer.decode(tokenizer.encode("<|im_start|>hi<|im_end|>")) == "hi"
    )


class TestStream:
  @hypothesis.given(st.lists(st.integers(0, 255), max_size=24))
  @hypothesis.settings(max_examples=300, deadline=None)
  def test_pieces_join_to_the_text_of_any_bytes(self, ids):
    tokenizer = tokenizer_lib.Tokenizer(_byte_backend())
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    # Bytes that are no UTF-8 come out too, as replacements, when they settle.
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)

  @hypothesis.given(st.text(max_size=12))
  @hypothesis.settings(max_examples=200, deadline=None)
  def test_no_piece_holds_half_a_character(self, text):
    text = text.replace("\ufffd", "")
    tokenizer = tokenizer_lib.Tokenizer(_byte_backend())
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)

  def test_each_character_comes_with_its_last_byte(self):
    tokenizer = tokenizer_lib.Tokenizer(_byte_backend())
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode("aé日🎉")]
    assert pieces == ["a", "", "é", "", "", "日", "", "", "", "🎉"]

  def test_half_a_character_at_the_end_is_replaced(self):
    tokenizer = tokenizer_lib.Tokenizer(_byte_backend())
    stream = tokenizer.stream()
    for token in tokenizer.encode("é")[:1]:
      assert stream.push(token) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""

  def test_spaces_between_words_survive_where_the_first_is_dropped(
    self, sentencepiece_gguf
  ):
    tokenizer = models.load_tokenizer(sentencepiece_gguf)
    stream = tokenizer.stream()
    ids = tokenizer.encode("ab ab é ab")
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == "ab ab é ab"
    assert pieces[:3] == ["", "ab", " ab"]  # BOS has no text.


class TestChat:
  def _tokenizer(self, template):
    return tokenizer_lib.Tokenizer(
      _byte_backend(bos="<s>"), template=template, bos_token="<s>"
    )

  def test_templates_see_what_they_expect(self):
    template = (
      "{{ bos_token }}{% for m in messages %}\n"
      "  {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
      "[{{ m.role }}] {{ m.content | tojson }}\n"
      "{% endfor %}\n"
      "{% if add_generation_prompt %}>{% endif %}"
    )
    messages = [
      {"role": "skip", "content": ""},
      {"role": "user", "content": "<é>"},
    ]
    text = self._tokenizer(template).chat(messages)
    assert text == '<s>[user] "<é>"\n>'

  def test_a_begun_text_gets_no_second_bos(self):
    backend = _byte_backend(bos="<s>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
      single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = tokenizer_lib.Tokenizer(backend, bos_token="<s>")
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert len(tokenizer.encode("a")) == 2

  @pytest.mark.parametrize(
    ("template", "message"),
    [
      (None, "no chat template"),
      ("{{ raise_exception('roles must alternate') }}", "must alternate"),
      ("{{ messages[7]['content'] + 'x' }}", "refuses these messages"),
      ("{{ messages.append(1) }}", "refuses these messages"),
      ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
  )
  def test_refusals_are_typed(self, template, message):
    with pytest.raises(errors.BadRequest, match=message):
      self._tokenizer(template).chat([{"role": "user", "content": "x"}])

  def test_a_damaged_template_is_refused(self):
    with pytest.raises(errors.CheckpointError, match="chat template: "):
      self._tokenizer("{% for %}").chat([])


class TestFolder:
  def _write(self, folder, **files):
    _byte_backend(bos="<s>", eos="</s>").save(str(folder / "tokenizer.json"))
    for name, content in files.items():
      (folder / f"{name}.json").write_text(json.dumps(content))

  def test_settings_come_from_the_files_beside_it(self, tmp_path):
    self._write(
      tmp_path,
      tokenizer_config={
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [
          {"name": "tools", "template": "tools"},
          {"name": "default", "template": "plain {{ eos_token }}"},
        ],
      },
      generation_config={"eos_token_id": [257, 9]},
      config={"eos_token_id": 5},
    )
    tokenizer = models.load_tokenizer(tmp_path)
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.eos_ids == (257, 9, 5)
    assert tokenizer.chat([]) == "plain </s>"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert models.load_tokenizer(tmp_path).chat([]) == "from a file"

  def test_a_bare_tokenizer_is_enough(self, tmp_path):
    self._write(tmp_path)
    tokenizer = models.load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"
    assert tokenizer.eos_ids == ()

  def test_a_missing_or_damaged_file_is_refused(self, tmp_path):
    with pytest.raises(errors.CheckpointError, match=r"tokenizer\.json"):
      models.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(errors.CheckpointError, match=r"tokenizer\.json: "):
      models.load_tokenizer(tmp_path)


class TestGguf:
  def test_sentencepiece_merges_follow_the_scores(self, sentencepiece_gguf):
    tokenizer = models.load_tokenizer(sentencepiece_gguf)
    first = 259
    # "ab" is the best piece, then " ab"; " a" never gets its turn.
    assert tokenizer.encode("ab") == [1, first + 5]
    assert tokenizer.encode("abba") == [1, first + 5, first + 6]
    euro = [3 + byte for byte in "€".encode()]
    assert tokenizer.encode("€") == [1, first, *euro]
    assert tokenizer.decode(tokenizer.encode("ab € ba")) == "ab € ba"
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.bos_token == "<s>"

  @pytest.mark.parametrize(
    ("pre", "words"),
    [
      ("llama-bpe", ["It", "'s", " ", "123", "45", " km", "!\n", "  \n", " x"]),
      (
        "qwen2",
        ["It", "'s", " ", "1", "2", "3", "4", "5", " km", "!\n", "  \n", " x"],
      ),
      ("gpt-2", ["It", "'s", " 12345", " km", "!", "\n  \n", " x"]),
    ],
  )
  def test_words_are_cut_as_the_family_does(
    self, tmp_path, write_tokenizer_gguf, pre, words
  ):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    file = write_tokenizer_gguf(
      tmp_path / "m.gguf", [*alphabet, "ab"], pre=pre, token_merges=["a b"]
    )
    backend = models.load_tokenizer(file).backend
    pieces = backend.pre_tokenizer.pre_tokenize_str("It's 12345 km!\n  \n x")
    text = [backend.decoder.decode([piece]) for piece, _ in pieces]
    assert text == words

  @pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
      ({"model": "bert"}, errors.UnsupportedCheckpoint, "model 'bert'"),
      ({"pre": "odd"}, errors.UnsupportedCheckpoint, "pre-tokenizer 'odd'"),
      ({"token_merges": ["a c"]}, errors.CheckpointError, "merges"),
      ({"token_merges": ["ba"]}, errors.CheckpointError, "merges"),
      ({"bos_token_id": 7}, errors.CheckpointError, "bos token 7 of 3"),
      ({"kinds": [1]}, errors.CheckpointError, "3 tokens, 3 of them"),
      ({"model": "llama"}, errors.CheckpointError, r"no tokenizer.ggml.scores"),
    ],
  )
  def test_what_cannot_be_rebuilt_is_refused(
    self, tmp_path, write_tokenizer_gguf, changes, error, message
  ):
    given = {"token_merges": ["a b"]} | changes
    file = write_tokenizer_gguf(tmp_path / "m.gguf", ["a", "b", "ab"], **given)
    with pytest.raises(error, match=rf"m\.gguf: .*{message}"):
      models.load_tokenizer(file)

  def test_a_missing_file_is_refused(self, tmp_path):
    with pytest.raises(errors.CheckpointError, match="No such file"):
      models.load_tokenizer(tmp_path / "none.gguf")
