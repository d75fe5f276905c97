"""Every notebook runs from top to bottom and is committed without outputs."""

import pathlib

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))


def test_there_is_a_tour():
  assert ROOT / "colabs" / "tour.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_a_badge_and_no_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  assert "colab-badge" in notebook.cells[0].source
  assert f"colabs/{path.name}" in notebook.cells[0].source
  code = [cell for cell in notebook.cells if cell.cell_type == "code"]
  assert code
  assert "pip" in code[0].source
  for cell in code:
    assert cell.outputs == []
    assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
  # In this process rather than in a kernel: the same strict dtypes and
  # warnings as every other test, and a traceback that names the cell.
  notebook = nbformat.read(path, as_version=4)
  scope: dict[str, object] = {"__name__": "__main__"}
  for index, cell in enumerate(notebook.cells):
    if cell.cell_type == "code":
      exec(compile(cell.source, f"{path.name}[{index}]", "exec"), scope)
