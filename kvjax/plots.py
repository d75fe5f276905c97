"""Pictures of what a cache does, for experiments and notebooks.

matplotlib is needed only here (the `experiments` extra) and is imported when
this module is. Figures are made without pyplot, so no window and no global
state is touched; a notebook shows the returned figure.
"""

import io
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from matplotlib import axes as matplotlib_axes
from matplotlib import colormaps
from matplotlib import figure
from matplotlib import ticker

# One colour for each series, in this order; told apart without colour vision.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def lines(
  series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
  *,
  title: str,
  x_label: str,
  y_label: str,
  steps: bool = False,
  log_x: bool = False,
) -> figure.Figure:
  """Draws one line for each series.

  Args:
    series: (x values, y values) by the name in the legend.
    title: what the picture shows.
    x_label: the quantity and unit of x.
    y_label: the quantity and unit of y.
    steps: a value holds until the next one, as counts of pages do.
    log_x: a logarithmic x axis.

  Returns:
    The figure; `save` writes it.
  """
  drawing = figure.Figure(figsize=(8, 4.5), layout="constrained")
  axes = drawing.add_subplot()
  for index, (name, (x, y)) in enumerate(series.items()):
    axes.plot(
      np.asarray(x),
      np.asarray(y),
      label=name,
      color=COLORS[index % len(COLORS)],
      drawstyle="steps-post" if steps else "default",
      marker="" if len(x) > 30 else ".",
    )
  if log_x:
    axes.set_xscale("log")
  axes.set_ylim(bottom=0)
  _label(axes, title, x_label, y_label)
  if len(series) > 1:
    axes.legend(frameon=False)
  return drawing


def stacked_bars(
  parts: Mapping[str, Sequence[float]],
  names: Sequence[str],
  *,
  title: str,
  x_label: str,
) -> figure.Figure:
  """Draws horizontal bars made of parts, one bar for each name.

  Args:
    parts: for each part its size in every bar, in the order of `names`.
    names: one for each bar, top to bottom.
    title: what the picture shows.
    x_label: the quantity and unit of a bar's length.

  Returns:
    The figure.
  """
  height = 1.6 + 0.45 * len(names)
  drawing = figure.Figure(figsize=(8, height), layout="constrained")
  axes = drawing.add_subplot()
  left = np.zeros(len(names))
  for index, (part, sizes) in enumerate(parts.items()):
    widths = np.asarray(sizes, dtype=float)
    axes.barh(
      np.arange(len(names)),
      widths,
      left=left,
      label=part,
      color=COLORS[index % len(COLORS)],
      edgecolor="white",
    )
    left = left + widths
  axes.set_yticks(np.arange(len(names)), list(names))
  axes.invert_yaxis()
  _label(axes, title, x_label, "")
  axes.legend(
    frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.25)
  )
  return drawing


def page_tables(
  tables: Mapping[str, Sequence[int]],
  *,
  page_size: int,
  lengths: Mapping[str, int],
  title: str = "Page tables",
) -> figure.Figure:
  """Draws page tables: a row for each sequence, a square for each page.

  A page has one colour wherever it appears, so a shared page is seen at once;
  the filled part of a square is the rows that the sequence sees of it.

  Args:
    tables: page ids in token order, by the sequence's name.
    page_size: rows of a page.
    lengths: rows of each sequence, by the same names.
    title: what the picture shows.

  Returns:
    The figure.
  """
  columns = max((len(pages) for pages in tables.values()), default=1)
  drawing = figure.Figure(
    figsize=(1.6 + 0.7 * max(columns, 4), 1.0 + 0.7 * len(tables)),
    layout="constrained",
  )
  axes = drawing.add_subplot()
  ids = sorted({page for pages in tables.values() for page in pages})
  palette = colormaps["tab20"]
  color = {page: palette(index % 20) for index, page in enumerate(ids)}
  for row, (name, pages) in enumerate(tables.items()):
    for column, page in enumerate(pages):
      rows = min(max(lengths[name] - column * page_size, 0), page_size)
      axes.barh(
        row,
        0.94 * rows / page_size,
        left=column,
        height=0.8,
        color=color[page],
        alpha=0.75,
      )
      axes.barh(row, 0.94, left=column, height=0.8, fill=False, edgecolor="0.3")
      axes.text(column + 0.47, row, str(page), ha="center", va="center")
  axes.set_yticks(range(len(tables)), list(tables))
  axes.set_xlim(-0.1, columns)
  axes.set_ylim(len(tables) - 0.4, -0.6)
  axes.set_xticks(
    range(columns + 1), [str(index * page_size) for index in range(columns + 1)]
  )
  axes.set_title(title, loc="left", fontsize=11)
  axes.set_xlabel("token")
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
  return drawing


def save(drawing: figure.Figure, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as a picture and returns the path.

  Args:
    drawing: the figure.
    path: where; the suffix chooses the format (.png, .svg, .pdf).
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  drawing.savefig(path, dpi=120)
  return path


def png(drawing: figure.Figure) -> bytes:
  """Returns a figure as the bytes of a PNG, for a notebook to display."""
  buffer = io.BytesIO()
  drawing.savefig(buffer, format="png", dpi=100)
  return buffer.getvalue()


def _label(
  axes: matplotlib_axes.Axes, title: str, x_label: str, y_label: str
) -> None:
  axes.set_title(title, loc="left", fontsize=11)
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  axes.grid(alpha=0.25)
  axes.set_axisbelow(True)
  axes.xaxis.set_major_formatter(ticker.FuncFormatter(_thousands))
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)


def _thousands(value: float, _position: int | None) -> str:
  return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:g}"
