"""Times paged attention beside what else could read the same bytes."""

import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_plan
from pallas_kernels import gpu_problems
from pallas_kernels.merge_states import api as merge_api
from pallas_kernels.paged_attention import api

Problem = gpu_problems.Problem
Operands = gpu_problems.Operands
# A step from a carry (the queries) and operands to the next carry.
Step = Callable[[jax.Array, Operands], jax.Array]


def time_steps(
  steps: Mapping[str, Step],
  carry: jax.Array,
  operands: Operands,
  plan: gpu_plan.Plan,
) -> dict[str, float | str]:
  """Times steps in turn.

  Args:
    steps: by name.
    carry: what each begins with.
    operands: what each is given.
    plan: how often.

  Returns:
    Median microseconds of one step by name, or why it could not run.
  """
  found: dict[str, float | str] = {}
  ready = {}
  for name, step in steps.items():
    run = _repeated(step, plan.steps)
    try:
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.block_until_ready(run(carry, operands))
    except Exception as error:  # JAX's own kernels may raise anything.
      text = " ".join(str(error).split())[:200]
      found[name] = f"{type(error).__name__}: {text}"
    else:
      ready[name] = run
  # Again: what a step imports as it is traced makes JAX forget the others.
  for run in ready.values():
    jax.block_until_ready(run(carry, operands))
  times: dict[str, list[float]] = {name: [] for name in ready}
  for number in range(plan.rounds):
    names = list(ready)
    turn = number % max(1, len(names))
    for name in names[turn:] + names[:turn]:
      start = time.perf_counter()
      jax.block_until_ready(ready[name](carry, operands))
      times[name].append(time.perf_counter() - start)
  for name, seconds in times.items():
    found[name] = statistics.median(seconds) / plan.steps * 1e6
  return found


def _repeated(step: Step, times: int) -> Callable[..., jax.Array]:
  """Steps chained in one program, so that launching is not what is timed."""

  @jax.jit
  def run(carry: jax.Array, operands: Operands) -> jax.Array:
    return jax.lax.fori_loop(
      0, times, lambda _, x: step(x, operands).astype(x.dtype), carry
    )

  return run


def time_problem(problem: Problem, plan: gpu_plan.Plan) -> dict[str, Any]:
  """Times one problem beside its baselines.

  Returns:
    `name`, `microseconds` by implementation (or why it did not run),
    `share_of_stream_read` and `ratio_vs_dense` of ours.
  """
  paged = gpu_problems.random_operands(problem)
  q = paged.pop("q")
  steps = {
    "ours": _paged_step(plan.implementation, problem),
    "stream": _stream_step,
  }
  if plan.implementation != "xla":
    steps["xla"] = _paged_step("xla", problem)
  if problem.is_rectangular and jnp.dtype(problem.kv_dtype).itemsize > 1:
    steps["dense"] = _dense_step(problem)
    for side in "kv":
      paged[f"dense_{side}"] = _contiguous(problem, paged[f"{side}_pages"])
  if problem.counts is None:
    steps["jax"] = _jax_step(problem)
  found = time_steps(steps, q, paged, plan)
  return {
    "name": problem.name,
    "status": "ok" if isinstance(found["ours"], float) else "wrong",
    "microseconds": found,
    "share_of_stream_read": _ratio(found, "stream", "ours"),
    "ratio_vs_dense": _ratio(found, "ours", "dense"),
    "ratio_vs_jax": _ratio(found, "ours", "jax"),
  }


def _ratio(
  found: Mapping[str, float | str], above: str, below: str
) -> float | None:
  over, under = found.get(above), found.get(below)
  if isinstance(over, float) and isinstance(under, float):
    return over / under
  return None


def _paged_step(implementation: str, problem: Problem) -> Step:
  return lambda q, x: gpu_problems.call(implementation, problem, {"q": q, **x})[
    0
  ]


def _stream_step(q: jax.Array, x: Operands) -> jax.Array:
  """Reads every byte of the pages once, and changes the carry a little."""
  total = jnp.zeros((), jnp.float32)
  for side in "kv":
    pages = x[f"{side}_pages"].astype(jnp.float32)
    total += jnp.maximum(pages, q[0, 0, 0].astype(jnp.float32)).max()
  return q + (total * 1e-6).astype(q.dtype)


def _dense_step(problem: Problem) -> Step:
  """`jax.nn.dot_product_attention` over `[batch, rows, kv_heads, dim]`."""
  batch, rows = len(problem.lengths), problem.width * problem.page_size
  count = problem.tokens // batch

  def step(q: jax.Array, x: Operands) -> jax.Array:
    last = (x["context_lens"] - count)[:, None] + jnp.arange(count)[None, :]
    seen = jnp.arange(rows)[None, None, :] <= last[:, :, None]
    with jax.numpy_dtype_promotion("standard"):
      out = jax.nn.dot_product_attention(
        q.reshape(batch, count, *q.shape[1:]),
        x["dense_k"],
        x["dense_v"],
        mask=seen[:, None],
      )
    return out.reshape(q.shape)

  return step


def _contiguous(problem: Problem, pages: jax.Array) -> jax.Array:
  """The pages' rows without pages; of random rows any order will do."""
  shape = (len(problem.lengths), -1, problem.kv_heads, problem.head_dim)
  return pages[1:-1].reshape(shape)


def _jax_step(problem: Problem) -> Step:
  """JAX's own paged decode kernel."""

  def step(q: jax.Array, x: Operands) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import paged_attention

    swapped = {}
    for side in "kv":
      pages = x[f"{side}_pages"]
      # Reads the same bytes, as the layout that this kernel wants.
      swapped[side] = pages.reshape(
        problem.kv_heads, -1, problem.page_size, problem.head_dim
      )
    scales = {}
    if "k_scales" in x:
      for side in "kv":
        count = problem.kv_heads * problem.page_size
        scales[f"{side}_scales_pages"] = x[f"{side}_scales"][
          :, 0, :count
        ].reshape(problem.kv_heads, -1, problem.page_size)
    with jax.numpy_dtype_promotion("standard"):
      return paged_attention.paged_attention(
        q,
        swapped["k"],
        swapped["v"],
        x["page_table"],
        x["context_lens"],
        k_splits=math.gcd(problem.width, 16),
        **scales,
      )

  return step


def time_prefix(
  sequences: int, shared: int, own: int, plan: gpu_plan.Plan
) -> dict[str, Any]:
  """Times a decode behind a shared prefix, flat and read once for all.

  Args:
    sequences: of the batch.
    shared: rows of the prefix.
    own: rows of each sequence after it.
    plan: how often.

  Returns:
    `sequences`, `shared_rows`, `microseconds` of both, and `speedup`, of
    splitting over flat.
  """
  problem = Problem("", (shared + own,) * sequences, **gpu_plan.LARGE)
  if plan.implementation == "xla":
    problem = dataclasses.replace(problem, q_heads=8, kv_heads=2, head_dim=64)
  x = gpu_problems.random_operands(problem)
  q = x.pop("q")
  pages = shared // problem.page_size
  x["page_table"] = (
    x["page_table"].at[:, :pages].set(x["page_table"][0, :pages])
  )

  def split(q: jax.Array, x: Operands) -> jax.Array:
    pool = {"k_pages": x["k_pages"], "v_pages": x["v_pages"]}
    ours = {"implementation": plan.implementation}
    prefix = api.paged_attention(
      q,
      page_table=x["page_table"][:1, :pages],
      context_lens=jnp.full((1,), shared, jnp.int32),
      query_starts=jnp.asarray([0, sequences], jnp.int32),
      causal=False,
      **pool,
      **ours,
    )
    suffix = api.paged_attention(
      q,
      page_table=x["page_table"][:, pages:],
      context_lens=x["context_lens"] - shared,
      **pool,
      **ours,
    )
    outs, lses = (jnp.stack(pair) for pair in zip(prefix, suffix, strict=True))
    return merge_api.merge_states(outs, lses)[0]

  steps = {"flat": _paged_step(plan.implementation, problem), "split": split}
  found = time_steps(steps, q, x, plan)
  return {
    "name": f"prefix {shared} of {sequences}",
    "status": "ok" if isinstance(found["split"], float) else "wrong",
    "sequences": sequences,
    "shared_rows": shared,
    "microseconds": found,
    "speedup": _ratio(found, "flat", "split"),
  }
