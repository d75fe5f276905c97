"""Turns what a caller asks for into a checked `Request`, or refuses it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvjax import cache as caches
from kvjax import errors
from kvjax import request as requests
from kvjax import text as text_lib

_SEED_STRIDE = 0x9E3779B97F4A7C15  # spreads request ids over the seeds

Prompt = str | Sequence[int] | np.ndarray


class Tokenizer(text_lib.Decodes, Protocol):
  """The part of a tokenizer that the engine uses.

  Where it has `eos_ids`, they end a sample.
  """

  def encode(self, text: str, /) -> list[int]: ...


class Intake:
  """Checks prompts against one engine's limits and numbers its requests.

  Args:
    cache: what the requests must fit.
    tokenizer: None where prompts are token ids only.
    vocab_size: token ids are below it.
    max_length: most tokens of a prompt.
    eos_ids: tokens that end a sample.
    seed: of requests that bring none.
  """

  def __init__(
    self,
    cache: caches.KVCache,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_length: int,
    eos_ids: frozenset[int],
    seed: int,
  ):
    self._cache = cache
    self._tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._max_length = max_length
    self._eos_ids = eos_ids
    self._seed = seed
    self._next_id = 0

  def make_request(
    self, prompt: Prompt, params: requests.SamplingParams, *, namespace: str
  ) -> requests.Request:
    """Makes a request with all its samples; see `Engine.submit`."""
    tokens = self._tokens(prompt, params)
    self._check_size(tokens, params)
    seed = params.seed
    if seed is None:
      seed = (self._seed + self._next_id * _SEED_STRIDE) % 2**64
    request = requests.Request(
      self._next_id, tokens, params, seed=seed, namespace=namespace
    )
    self._next_id += 1
    request.samples = tuple(
      self._make_sample(request, index) for index in range(params.n)
    )
    return request

  def _tokens(
    self, prompt: Prompt, params: requests.SamplingParams
  ) -> np.ndarray:
    if self._tokenizer is None:
      if isinstance(prompt, str) or params.stop:
        raise errors.BadRequest(
          "text prompts and stop strings need an engine with a tokenizer"
        )
    elif isinstance(prompt, str):
      prompt = self._tokenizer.encode(prompt)
    return token_array(prompt, self._vocab_size)

  def _check_size(
    self, tokens: np.ndarray, params: requests.SamplingParams
  ) -> None:
    if len(tokens) > self._max_length:
      raise errors.PromptTooLong(
        f"the prompt has {len(tokens)} tokens, the limit is {self._max_length}"
      )
    # The last token drawn is never computed.
    rows = min(len(tokens) + params.max_tokens - 1, self._max_length)
    if not self._cache.allocator.can_fit(rows):
      raise errors.NeverFits(
        f"{len(tokens)} prompt tokens and max_tokens={params.max_tokens} need "
        f"{self._cache.allocator.pages_needed(rows)} pages of each group, the "
        f"pools have {[use.total for use in self._cache.usage()]}"
      )

  def _make_sample(
    self, request: requests.Request, index: int
  ) -> requests.Sample:
    params, stream = request.params, None
    if self._tokenizer is not None:
      stream = text_lib.TextStream(
        self._tokenizer, request.prompt_tokens.tolist(), params.stop
      )
    length = len(request.prompt_tokens) + params.max_tokens
    stop_tokens = frozenset(params.stop_token_ids)
    return requests.Sample(
      request,
      index,
      max_length=min(length, self._max_length + 1),
      stop_tokens=(
        stop_tokens if params.ignore_eos else stop_tokens | self._eos_ids
      ),
      text_stream=stream,
    )


def token_array(prompt: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
  """Token ids as int32, every one of them checked.

  Args:
    prompt: token ids.
    vocab: ids are below it.

  Raises:
    EmptyPrompt: there are none.
    TokenOutOfRange: one is no token id.
  """
  tokens = np.asarray(prompt)
  if tokens.size == 0:
    raise errors.EmptyPrompt("the prompt has no tokens")
  if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
    raise errors.TokenOutOfRange(
      f"token ids are {tokens.dtype} of shape {tokens.shape}, expected a row "
      "of integers"
    )
  bad = (tokens < 0) | (tokens >= vocab)
  if bad.any():
    position = int(bad.argmax())
    raise errors.TokenOutOfRange(
      f"token id {tokens[position]} at position {position} is not in the "
      f"vocabulary of {vocab}"
    )
  return tokens.astype(np.int32)
