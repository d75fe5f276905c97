"""What the compilers for both platforms share: from a case to its row."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from pallas_kernels import aot_cases
from pallas_kernels import dispatch

Function = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def row(
  case: aot_cases.Case,
  target: str,
  platform: str,
  baseline_reason: Callable[[aot_cases.Case], str | None],
  compile_case: Callable[[aot_cases.Case, str], dict[str, Any]],
) -> aot_cases.Row:
  """Compiles a case unless it is refused; a compiler's refusal is a row too.

  Args:
    case: ours or JAX's own.
    target: of the platform.
    platform: "tpu" or "gpu".
    baseline_reason: why one of JAX's own kernels cannot be asked, or None.
    compile_case: what is known of the compiled case, by the row's fields.
  """
  if case.implementation == "jax":
    reason = baseline_reason(case)
  else:
    reason = aot_cases.why_unsupported(case, platform)
  if reason is not None:
    return aot_cases.row_of(case, target, aot_cases.UNSUPPORTED, reason=reason)
  try:
    with warnings.catch_warnings(), dispatch.tracing_for(platform):
      warnings.simplefilter("ignore")
      found = compile_case(case, target)
  except Exception as error:  # A compiler may raise anything; all is reported.
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return aot_cases.row_of(case, target, aot_cases.FAILED, reason=reason[:500])
  return aot_cases.row_of(case, target, aot_cases.COMPILED, **found)


def function_of(call: aot_cases.Call) -> Function:
  """A call as a function, its operands, and which of them are given up."""
  rest = {
    field.name: getattr(call.operands, field.name)
    for field in dataclasses.fields(call.operands)
  }
  given = {name: rest.pop(name) for name in call.donated}

  def run(given: dict[str, Any], rest: dict[str, Any]) -> Any:
    return call.run(type(call.operands)(**given, **rest))

  return run, (given, rest), (0,)
