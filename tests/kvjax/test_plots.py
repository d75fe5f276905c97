"""The pictures hold what they were given, and need no display."""

import numpy as np

from kvjax import plots


def test_lines_draw_each_series_with_its_values_and_name():
  drawing = plots.lines(
    {"on": ([0, 1, 2], [0, 5, 3]), "off": ([0, 1], [7, 8])},
    title="t",
    x_label="seconds",
    y_label="pages",
    steps=True,
  )
  drawn = drawing.axes[0].get_lines()
  np.testing.assert_array_equal(drawn[0].get_ydata(), [0, 5, 3])
  np.testing.assert_array_equal(drawn[1].get_ydata(), [7, 8])
  legend = drawing.axes[0].get_legend()
  assert legend is not None
  assert [text.get_text() for text in legend.get_texts()] == ["on", "off"]


def test_stacked_bars_end_at_the_sum_of_their_parts():
  drawing = plots.stacked_bars(
    {"used": [1.0, 2.0], "free": [3.0, 4.0]},
    ["a", "b"],
    title="t",
    x_label="bytes",
  )
  ends = [bar.get_x() + bar.get_width() for bar in drawing.axes[0].patches]
  assert ends == [1.0, 2.0, 4.0, 6.0]


def test_a_shared_page_has_one_colour_and_a_partial_page_is_part_filled():
  drawing = plots.page_tables(
    {"parent": [1, 2], "child": [1, 3]},
    page_size=4,
    lengths={"parent": 8, "child": 5},
  )
  filled = [bar for bar in drawing.axes[0].patches if bar.get_fill()]
  colors = [bar.get_facecolor() for bar in filled]
  assert colors[0] == colors[2]
  assert colors[1] != colors[3]
  widths = [round(bar.get_width() / 0.94, 6) for bar in filled]
  assert widths == [1, 1, 1, 0.25]


def test_save_writes_a_picture_and_makes_the_folder(tmp_path):
  drawing = plots.lines(
    {"only": ([0, 1], [1, 2])}, title="t", x_label="x", y_label="y"
  )
  path = plots.save(drawing, tmp_path / "deep" / "picture.png")
  assert path.read_bytes().startswith(b"\x89PNG")


def test_png_gives_a_notebook_something_to_display():
  drawing = plots.stacked_bars({"a": [1.0]}, ["x"], title="t", x_label="x")
  assert plots.png(drawing).startswith(b"\x89PNG")
