"""What the figures draw is what the trace and the costs say: artists, without a page."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from megatron_paradyse.report.content import Content
from megatron_paradyse.report.cost_figures import (
    draw_cost_curves,
    draw_predictions,
    has_predictions,
    peak_of,
    thinned,
)
from megatron_paradyse.report.plan_figures import (
    MOST_LAYERS_DRAWN,
    column_lengths,
    draw_lengths,
    draw_plan_map,
    draw_shares,
)
from megatron_paradyse.report.run_figures import draw_memory, has_peaks
from megatron_paradyse.report.style import COLOURS, Look
from megatron_paradyse.report.trace_file import read_trace
from tests.report.samples import LENGTHS, PLANS, RUN, microbatch, records, write_trace


def drawn(draw, content: Content, *, narrow: bool = False):
    figure = Figure()
    draw(figure, content, Look(narrow))
    return figure.axes


def content_of(folder, lines, costs=None) -> Content:
    return Content([read_trace(str(write_trace(folder / "t.jsonl", lines)), costs)], costs)


def rectangles(axes) -> list[tuple[str, float, float, float, float]]:
    """Colour, left, width, top and bottom layer edge."""
    return [
        (to_hex(r.get_facecolor()), *(round(x, 6) for x in (r.get_x(), r.get_width(), y, y + h)))
        for r in axes.patches
        for y, h in [(r.get_y(), r.get_height())]
    ]


def colour(name: str) -> str:
    return to_hex(COLOURS[name][0])


def test_a_cell_of_the_map_has_its_attention_left_and_its_mlp_right(tmp_path):
    (axes,) = drawn(draw_plan_map, content_of(tmp_path, [RUN, microbatch(1, plan=PLANS[1])]))
    assert rectangles(axes) == [
        (colour("ulysses_z"), -0.46, 0.46, 0.5, 4.5),
        (colour("metp"), 0.0, 0.46, 0.5, 2.5),
        (colour("ulysses_z"), 0.0, 0.46, 2.5, 4.5),
    ]
    assert axes.get_ylim() == (4.5, 0.5)


def test_of_many_layers_some_are_drawn_over_the_height_of_all(tmp_path):
    count = 2 * MOST_LAYERS_DRAWN
    plan = f"1-100 metp, 101-{count} megatron_ts"
    (axes,) = drawn(draw_plan_map, content_of(tmp_path, [RUN, microbatch(1, plan=plan)]))
    assert [edges[3:] for edges in rectangles(axes)] == 2 * [(0.5, 100.5), (100.5, count + 0.5)]
    assert axes.get_ylabel() == "layer (one in 2 drawn)"


def test_columns_are_as_many_as_asked_and_even_by_logarithm():
    lengths = list(range(64, 64 * 1025, 64))
    columns = column_lengths([*lengths, *lengths], 16)
    assert len(columns) == 16 and columns == sorted(columns) and columns[-1] == lengths[-1]
    widest = math.log(1024) / 16
    for below, longest in itertools.pairwise(columns):
        first = next(length for length in lengths if length > below)
        assert math.log(longest / first) <= widest + 1e-9
    assert column_lengths([3, 1, 2, 2], 3) == [1, 2, 3]


def test_bars_of_shares_are_those_of_layers_above_those_of_time(tmp_path):
    lines = [
        RUN,
        microbatch(1, plan="1-4 metp", seconds=3.0),
        microbatch(2, plan="1-2 metp, 3-4 ulysses_z", seconds=1.0),
    ]
    (axes,) = drawn(draw_shares, content_of(tmp_path, lines))
    bars = {(round(b.get_y() + b.get_height() / 2, 6), b.get_width()) for b in axes.patches}
    assert bars == {(-0.2, 75.0), (0.2, 87.5), (0.8, 25.0), (1.2, 12.5)}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["metp", "ulysses_z"]


def test_bars_of_lengths_are_over_their_sequences(tmp_path):
    content = content_of(tmp_path, [RUN, *(microbatch(1, s) for s in (*LENGTHS, 1000, 1100))])
    (axes,) = drawn(draw_lengths, content)
    bars = [(b.get_x(), b.get_x() + b.get_width(), b.get_height()) for b in axes.patches]
    assert [height for *_, height in bars] == [1, 2, 1, 1, 1]
    for length, (left, right, _) in zip((128, 1000, 1100, 4096, 8192), bars, strict=True):
        assert left <= length < right and right / left == pytest.approx(2**0.25)


def test_points_are_measured_across_and_predicted_upwards(tmp_path):
    mib = 2**20
    sizes = {"peak_bytes": 100 * mib, "predicted_peak_bytes": 125 * mib}
    lines = [
        RUN,
        microbatch(1, plan="1-4 metp", seconds=0.4, predicted_seconds=0.5, **sizes),
        microbatch(2, seconds=2.0, predicted_seconds=1.0, peak_bytes=None),
    ]
    seconds, peaks = drawn(draw_predictions, content_of(tmp_path, lines))
    points = {to_hex(line.get_color()): line.get_xydata().tolist() for line in seconds.lines[:2]}
    assert sorted(itertools.chain(*points.values())) == [[0.4, 0.5], [2.0, 1.0]]
    assert peaks.lines[0].get_xydata().tolist() == [[100.0, 125.0]]
    assert peaks.get_xlabel() == "measured (MiB)" and seconds.get_ylabel() == "predicted (s)"
    assert "median error 25.0%" in seconds.get_title() and "25.0%" in peaks.get_title()


def test_curves_are_the_fitted_costs_and_points_the_measured(costs):
    model, table = costs.require_model(), costs.table
    panels = drawn(draw_cost_curves, Content([], costs))
    assert [axes.get_title().split()[0] for axes in panels] == ["attention", "MLP"] * 2
    for axes, (in_time, half) in zip(
        panels, itertools.product((True, False), ("attention", "mlp")), strict=True
    ):
        unit = 1e-3 if in_time else 2**20
        by_name = {line.get_label(): line for line in axes.lines}

        def value(found, unit=unit, in_time=in_time):
            return (found.time_seconds if in_time else peak_of(found)) / unit

        for length, drawn_at in by_name["metp+recompute"].get_xydata()[[0, -1]]:
            of = model.operation("metp+recompute", half, int(length), 1)
            assert drawn_at == pytest.approx(value(of))
        measured = [
            [m.seq_length, value(m)]
            for m in table.measurements
            if (m.strategy, m.operation) == ("metp", half)
        ]
        points = [line.get_xydata() for line in axes.lines if line.get_linestyle() == "None"]
        assert len(points) == 4 and len(measured) == 4
        assert any(found == pytest.approx(np.array(measured)) for found in points)
        assert ("ms" if in_time else "MiB") in axes.get_ylabel()


def test_rows_are_thinned_to_no_more_than_the_most():
    for count in (1, 10, 11, 19, 20, 21, 1000):
        shown = thinned(range(count), 10)
        assert min(count, 5) <= len(shown) <= 10 and shown[0] == 0


def test_a_panel_goes_below_another_where_it_is_narrow(tmp_path):
    content = content_of(tmp_path, records(2))
    for narrow, columns in ((True, 1), (False, 2)):
        grids = {a.get_gridspec().ncols for a in drawn(draw_predictions, content, narrow=narrow)}
        assert grids == {columns}


def test_the_largest_peak_of_an_iteration_is_drawn_of_all_grids(tmp_path):
    mib = 2**20

    def row(iteration, peak, predicted):
        return microbatch(iteration, peak_bytes=peak * mib, predicted_peak_bytes=predicted * mib)

    grids = ([row(1, 100, 90), row(1, 300, 80), row(2, 50, 60)], [row(1, 200, 95), row(2, 70, 40)])
    traces = [
        read_trace(str(write_trace(tmp_path / f"t-dp{i}-pp0.jsonl", lines)))
        for i, lines in enumerate(grids)
    ]
    (axes,) = drawn(draw_memory, Content(traces, None))
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points == {"measured": [[1, 300], [2, 70]], "predicted": [[1, 95], [2, 60]]}
    failed = {**row(3, 400, 1), "kind": "out_of_memory", "memory_margin": 0.03}
    (axes,) = drawn(draw_memory, content_of(tmp_path, [RUN, failed]))
    assert axes.lines[-1].get_xydata().tolist() == [[3, 400]]


@pytest.mark.parametrize("known", ["peak_bytes", "predicted_peak_bytes", None])
def test_either_peak_is_enough_to_draw(known, tmp_path):
    none = {"peak_bytes": None, "predicted_peak_bytes": None}
    lines = [RUN, microbatch(1, **{**none, **({known: 1 << 20} if known else {})})]
    assert has_peaks(content_of(tmp_path, lines)) == bool(known)


def test_what_was_not_both_predicted_and_measured_is_not_compared(tmp_path):
    none = {"peak_bytes": None, "predicted_peak_bytes": None}
    assert len(drawn(draw_predictions, content_of(tmp_path, [RUN, microbatch(1, **none)]))) == 1
    for name in ("seconds", "predicted_seconds"):
        assert not has_predictions(content_of(tmp_path, [RUN, microbatch(1, **{name: None})]))
