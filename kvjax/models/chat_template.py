"""Chat templates in Jinja, run in a sandbox: they come with a checkpoint."""

import datetime
import json
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvjax import errors


class ChatTemplate:
  """A compiled template, with the names that templates expect."""

  def __init__(self, source: str):
    """Compiles it.

    Args:
      source: Jinja.

    Raises:
      CheckpointError: It is not valid.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    names = {"raise_exception": _refuse, "strftime_now": _format_now}
    try:
      self._template = environment.from_string(source, globals=names)
    except jinja2.TemplateError as error:
      raise errors.CheckpointError(f"chat template: {error}") from error

  def __call__(
    self, messages: Sequence[Mapping[str, Any]], **variables: Any
  ) -> str:
    """Renders a conversation, up to where the assistant speaks.

    Args:
      messages: Turns with "role" and "content".
      **variables: Further names, such as bos_token.

    Raises:
      BadRequest: The template refuses the messages, or stumbles over them.
    """
    try:
      return self._template.render(
        messages=messages, add_generation_prompt=True, **variables
      )
    except (jinja2.TemplateError, TypeError, LookupError) as error:
      raise errors.BadRequest(
        f"the chat template refuses these messages: {error}"
      ) from error


def _to_json(value: Any, indent: int | None = None) -> str:
  """Without the HTML escapes of Jinja's own."""
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
  return datetime.datetime.now().strftime(pattern)
