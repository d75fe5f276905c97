"""The command that compiles ahead: its cases, table, JSON and exit status."""

import json

import pytest

from pallas_kernels import aot
from pallas_kernels import aot_cases
from pallas_kernels import aot_gpu
from pallas_kernels.paged_attention import shapes

FIELDS = {
  "op",
  "implementation",
  "target",
  "shape",
  "status",
  "reason",
  "vmem_bytes",
  "registers",
  "spill_bytes",
  "bundles",
}


def _named(op, implementation="gpu", **sizes):
  def fits(case):
    return case.op == op and all(
      getattr(case.shape, name) == value for name, value in sizes.items()
    )

  return next(filter(fits, aot_cases.cases(implementation, subset=False)))


@pytest.fixture
def compiler(monkeypatch):
  """`aot_gpu` without a compiler: a row for each case, by its sizes."""

  def compile_case(case, target):
    reason = None
    if case.implementation != "jax":
      reason = aot_cases.why_unsupported(case, "gpu")
    if reason is not None:
      return aot_cases.row_of(
        case, target, aot_cases.UNSUPPORTED, reason=reason
      )
    return aot_cases.row_of(
      case, target, aot_cases.COMPILED, registers=168, spill_bytes=0
    )

  monkeypatch.setattr(aot_gpu, "missing", lambda: None)
  monkeypatch.setattr(aot_gpu, "compile_case", compile_case)
  return compile_case


def test_every_target_of_both_kinds_is_known():
  assert set(aot.TARGETS) == {"v4", "v5e", "v5p", "v6e", "7x", "h100", "h200"}


def test_the_command_writes_json_and_prints_a_table(tmp_path, compiler, capsys):
  out = tmp_path / "aot.json"
  assert aot.main([f"--out={out}", "--targets=h200", "--subset"]) == 0
  rows = json.loads(out.read_text())
  assert all(set(row) == FIELDS for row in rows)
  assert {row["op"] for row in rows} == {
    "paged_attention",
    "merge_states",
    "write_kv",
    "copy_rows",
    "jax.paged_attention",
  }
  for row in rows:
    assert (row["reason"] is None) == (row["status"] == "compiled")
  captured = capsys.readouterr()
  assert f"{len(rows)}/{len(rows)} h200 jax" in captured.err
  printed = captured.out
  assert "decode_d128_g4_p16_bfloat16_int8" in printed
  assert "gpu unsupported: queries are float32" in printed
  assert "h200 jax: " in printed


def test_a_case_that_neither_compiles_nor_is_refused_fails_the_command(
  tmp_path, monkeypatch, compiler
):
  def broken(case, target):
    row = compiler(case, target)
    if case.shape.name != "decode_d128_window":
      return row
    return aot_cases.row_of(case, target, aot_cases.FAILED, reason="smem")

  monkeypatch.setattr(aot_gpu, "compile_case", broken)
  arguments = [f"--out={tmp_path / 'x.json'}", "--targets=h200", "--subset"]
  assert aot.main(arguments) == 1


def test_a_run_that_is_stopped_keeps_what_it_compiled(
  tmp_path, monkeypatch, compiler
):
  compiled = []

  def stopped(case, target):
    if len(compiled) == 3:
      raise KeyboardInterrupt
    compiled.append(case)
    return compiler(case, target)

  monkeypatch.setattr(aot_gpu, "compile_case", stopped)
  out = tmp_path / "aot.json"
  with pytest.raises(KeyboardInterrupt):
    aot.main([f"--out={out}", "--targets=h200", "--subset"])
  names = [row["shape"] for row in json.loads(out.read_text())]
  assert names == [case.shape.name for case in compiled]


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--targets=b200"], "'b200' is not one of v4"),
    (["--targets=h200"], "cannot compile for h200: no compiler"),
  ],
)
def test_bad_targets_are_named(tmp_path, monkeypatch, capsys, arguments, said):
  monkeypatch.setattr(aot_gpu, "missing", lambda: "no compiler")
  with pytest.raises(SystemExit):
    aot.main([f"--out={tmp_path / 'x.json'}", *arguments])
  assert said in capsys.readouterr().err


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_the_subset_has_every_width_dtype_page_group_and_mask(implementation):
  subset = [
    case.shape
    for case in aot_cases.cases(implementation, subset=True)
    if case.op == "paged_attention"
  ]
  assert len(subset) < 50
  assert {s.head_dim for s in subset} == set(shapes.HEAD_DIMS)
  assert {(s.dtype, s.kv_dtype) for s in subset} == set(shapes.DTYPES)
  assert {s.page_size for s in subset} == set(shapes.PAGE_SIZES)
  assert {s.q_heads // s.kv_heads for s in subset} == set(shapes.GROUPS)
  assert {s.is_decode for s in subset} == {True, False}
  assert any(s.window for s in subset)
  assert any(s.soft_cap for s in subset)


def test_why_unsupported_is_asked_of_the_shape_as_it_is_called():
  plain = _named("paged_attention", kv_dtype="int8", head_dim=256)
  assert aot_cases.why_unsupported(plain, "gpu") is None
  exact = _named("paged_attention", dtype="float32")
  assert "TF32" in aot_cases.why_unsupported(exact, "gpu")
