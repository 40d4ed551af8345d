"""The page: whole, self-contained, true to the trace, and safe from it."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from megatron_paradyse.errors import UserError
from megatron_paradyse.report.content import Content, Curve
from megatron_paradyse.report.figures import KINDS
from megatron_paradyse.report.page import render
from megatron_paradyse.report.run_figures import POINTS_OF_LINE, draw_cumulative
from megatron_paradyse.report.style import Look, styles_of
from megatron_paradyse.report.trace_file import read_trace
from tests.report.samples import (
    BUDGET,
    LENGTHS,
    PADDING,
    PLANS,
    RUN,
    elements,
    iteration,
    microbatch,
    records,
    report,
    write_trace,
)

NAMES = [kind.name for kind in KINDS]


def test_the_page_is_well_formed_and_has_every_figure_with_words(made):
    page = ET.parse(made[0] / "page.html").getroot()
    svgs = elements(page, "svg")
    assert len(svgs) == 2 * len(NAMES)  # wide and narrow
    sections = {e.get("id"): e for e in elements(page, "section")}
    for name in NAMES:
        images = [e for e in sections[name].iter() if e.get("role") == "img"]
        assert len(images) == 2 and all(len(e.get("aria-label")) > 40 for e in images)
        assert elements(sections[name], "figcaption")[0].text


def test_every_figure_is_also_a_png_with_labels_and_a_footer(made):
    folder, numbers = made
    assert [path.split("/")[-1] for path in numbers["figures"]] == [f"{n}.png" for n in NAMES]
    for name in NAMES:
        assert (folder / "page-figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = ET.parse(folder / "page.html").getroot()
    for svg in elements(page, "svg"):
        texts = " ".join("".join(text.itertext()) for text in elements(svg, "text"))
        assert "simulated" in texts and re.search(r"drawn\s+20\d\d-", texts), texts[-300:]
        assert re.search(r"\((tokens|s|ms|%|MiB|GiB)|iteration|microbatches by", texts)


def test_the_page_loads_nothing_and_runs_nothing(made):
    text = (made[0] / "page.html").read_text()
    page = ET.fromstring(text)
    assert not elements(page, "script") and not elements(page, "link")
    for element in page.iter():
        for name, value in element.attrib.items():
            name = name.split("}")[-1]
            assert not name.startswith("on"), name
            if name in ("href", "src"):
                assert value.startswith("#"), value
    for address in set(re.findall(r"https?://[^\s\"'<]+", text)):
        assert address.startswith("http://www.w3.org/"), address  # names of XML, never fetched


def test_ids_are_unique_and_references_meet_them(made):
    page = ET.parse(made[0] / "page.html").getroot()
    ids = [e.get("id") for e in page.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    text = (made[0] / "page.html").read_text()
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert used and {a or b for a, b in used} <= set(ids)


def test_the_numbers_are_those_of_the_trace(made):
    folder, numbers = made
    assert numbers["iterations"] == 9 and numbers["microbatches"] == 8
    assert numbers["tokens"] == 9000 and numbers["seconds"] == pytest.approx(4.5)
    assert numbers["tokens_per_second"] == pytest.approx(2000)
    assert numbers["longest_sequence_tokens"] == max(LENGTHS) - PADDING
    assert numbers["changes_of_plan"] == 7 and numbers["out_of_memory"] == 1
    assert numbers["starts"] == 2 and numbers["memory_budget_bytes"] == BUDGET
    assert numbers["median_error_seconds"] == pytest.approx(0.1)
    assert numbers["median_error_peak_bytes"] == pytest.approx(0.05)
    # PLANS in turn: 3, 3 and 2 times; by hand the halves of four layers each.
    shares = {"megatron_ts": 3, "ulysses_z": 3 * 3 / 4, "metp": 3 / 4 * 1 / 3 * 1}
    assert numbers["layer_shares"]["megatron_ts"] == pytest.approx(shares["megatron_ts"] / 8)
    assert numbers["layer_shares"]["metp+recompute"] == pytest.approx(2 * 1 / 4 / 8)
    assert sum(numbers["layer_shares"].values()) == pytest.approx(1)
    text = (folder / "page.html").read_text()
    assert "9,000" in text and "8,192 tokens" in text and "2 starts" in text


def test_estimates_are_the_cost_models(made, costs):
    """Time of one strategy on all microbatches that fit, added up by hand."""
    numbers, model = made[1], costs.require_model()
    expected = 0.0
    for i in range(8):
        s = -(-LENGTHS[i % 4] // 64) * 64
        expected += 4 * sum(
            model.operation("metp+recompute", half, s).time_seconds for half in ("attention", "mlp")
        )
    estimates = numbers["estimates"]
    assert estimates["fixed"]["metp+recompute"]["would_not_fit"] == 0
    assert estimates["fixed"]["metp+recompute"]["seconds"] == pytest.approx(expected)
    assert estimates["predicted_seconds"] == pytest.approx(8 * 0.11)
    fitting = {n: v["seconds"] for n, v in estimates["fixed"].items() if not v["would_not_fit"]}
    assert estimates["best_fixed"] == min(fitting, key=fitting.__getitem__)


def test_strategies_over_the_budget_are_told_and_never_the_best(tmp_path, costs):
    tight = {**RUN, "stages": [{**RUN["stages"][0], "budget_bytes": 210_000_000}]}
    trace = write_trace(tmp_path / "t.jsonl", records(8, run=tight))
    content = Content([read_trace(str(trace), costs)], costs)
    unfit = {one.name for one in content.fixed if one.num_unfit}
    assert unfit and "metp+recompute" not in unfit
    assert content.best_fixed is not None and content.best_fixed.name not in unfit
    for name, curve in content.cumulative.items():
        assert (curve.oom_length is not None) == (name in unfit), name
        assert all(s < (curve.oom_length or 1 << 40) for s in curve.lengths)


def test_a_trace_without_run_or_predictions_is_drawn_as_far_as_it_goes_without_torch(tmp_path):
    plain = {"predicted_seconds": None, "predicted_peak_bytes": None, "peak_bytes": None}
    lines = [microbatch(1, **plain), {"kind": "iteration", "iteration": 1, "seconds": 1.0}]
    trace = write_trace(tmp_path / "t.jsonl", lines)
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom megatron_paradyse.cli import cli\n"
        f"result = CliRunner().invoke(cli, ['report', {str(trace)!r}, '-o', "
        f"{str(tmp_path / 'r.html')!r}])\nassert result.exit_code == 0, result.output\n"
        "found = {name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'xgboost'}\n"
        "assert not found, found\nassert 'matplotlib.pyplot' not in sys.modules\n"
        "assert '3 figures in' in result.stdout and result.stderr.count('not drawn: ') == 4\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    text = (tmp_path / "r.html").read_text()
    assert text.count("Not drawn: ") == 4 and "do not say what ran" in text
    assert "give the fitted cost file as --costs" in text


def test_a_short_run_of_one_strategy_is_told_in_full_digits_and_said_once(tmp_path, costs):
    lines = [RUN, *(microbatch(1, s, seconds=0.0123) for s in LENGTHS), iteration(1, seconds=0.25)]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs)], costs)
    said = {kind.name: kind.words(content) for kind in KINDS}
    assert said["plans"].startswith("At every length attention runs megatron_ts. Where"), said
    page = render(content, [], [])
    assert "0.25 s of iterations" in page and "memory budget 476.8 MiB a rank" in page


def test_words_of_the_map_tell_its_two_ends_and_not_what_is_between(tmp_path):
    names = ("metp", "megatron_ts", "metp", "megatron_ts")
    lines = [RUN, *(microbatch(1, s, f"1-4 {n}") for s, n in zip(LENGTHS, names, strict=True))]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)))], None)
    (words,) = (kind.words for kind in KINDS if kind.name == "plans")
    assert words(content).startswith(
        "At the shortest lengths, up to 128 tokens, attention runs metp; at the longest, 8K, "
        "megatron_ts. "
    )


def test_words_of_lengths_say_whose_are_not_there(tmp_path):
    (words,) = (kind.words for kind in KINDS if kind.name == "lengths")
    alone = "1 sequence, the longest of 512 tokens, padding included."
    rows = [microbatch(i, 1024, documents=9, tokens=1000) for i in range(2)]
    for more, said in ([], ""), (rows, " A trace has no lengths of the documents of packed rows."):
        trace = write_trace(tmp_path / "t.jsonl", [RUN, microbatch(1, 512), *more])
        assert words(Content([read_trace(str(trace))], None)) == alone + said


def test_that_every_single_strategy_fits_is_said_as_such(tmp_path, costs):
    lines = [RUN, microbatch(1, 1000), iteration(1)]
    content = Content([read_trace(str(write_trace(tmp_path / "t.jsonl", lines)), costs)], costs)
    (words,) = (kind.words for kind in KINDS if kind.name == "cumulative")
    assert words(content).startswith("Every single strategy fits every microbatch; the fastest is")


def test_a_trace_without_a_figure_names_no_folder_of_them(tmp_path):
    trace = write_trace(tmp_path / "t.jsonl", [RUN, iteration(1)])
    said = report(trace, "-o", tmp_path / "page.html").stdout
    assert said == f"0 figures, the page is {tmp_path / 'page.html'}\n"
    assert not (tmp_path / "page-figures").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("no room")])
def test_a_report_that_ends_early_leaves_no_new_folder_of_figures(error, tmp_path, monkeypatch):
    def end(*_):
        raise error

    trace = write_trace(tmp_path / "t.jsonl", records(2))
    assert report(trace, "-o", tmp_path / "old.html").exit_code == 0
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("megatron_paradyse.report.page.render", end)
    for name in ("old.html", "new.html"):
        assert report(trace, "-o", tmp_path / name).exit_code != 0
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/x/y.jsonl"], "does not exist: give the file that --paradyse-trace wrote"),
        (["TRACE", "-o", "/x/y/r.html"], "there is no folder /x/y: make it"),
        (["TRACE", "-o", "/tmp"], "give the name of a file"),
        (["TRACE", "--costs", "/x.json"], "/x.json does not exist"),
        (["TRACE"] * 300, "give at most 256"),
        (["TRACE", "TRACE"], "t.jsonl is given 2 times: give each trace once"),
        ([], "Missing argument 'TRACE...'"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message, tmp_path):
    trace = write_trace(tmp_path / "t.jsonl", records(1))
    result = report(*(str(trace) if a == "TRACE" else a for a in arguments))
    assert result.exit_code in (1, 2) and message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line]) == 1


def test_every_plan_of_the_samples_is_in_the_map(made):
    page = ET.parse(made[0] / "page.html").getroot()
    (section,) = [e for e in elements(page, "section") if e.get("id") == "plans"]
    labels = {"".join(text.itertext()) for text in elements(section, "text")}
    named = {n for plan in PLANS for n in re.findall(r"[a-z_]+(?:\+recompute)?", plan)}
    assert named <= labels and {"128", "4K", "8K"} <= labels


def test_offload_looks_like_recompute_but_is_told_apart():
    styles = styles_of(["metp", "metp+recompute", "metp+offload"])
    assert len({style.colour for style in styles.values()}) == 1
    assert len({style.hatch for style in styles.values()}) == 3
    assert len({str(style.line["linestyle"]) for style in styles.values()}) == 3
    assert styles["metp+offload"].points["markerfacecolor"] == "none"


@pytest.mark.parametrize("lengths", [(64,), (64, 128)])
def test_a_run_of_one_length_is_a_point_beside_its_strategies(lengths):
    """As of sequences of fixed length: a line of one point is not to be seen."""
    from matplotlib.figure import Figure

    curve = Curve(lengths, tuple(float(s) for s in lengths))
    content = Content((), None)
    content.__dict__["cumulative"] = dict.fromkeys(("measured", "predicted", "metp"), curve)
    figure = Figure()
    draw_cumulative(figure, content, Look())
    ours = [line for line in figure.axes[0].get_lines() if "this run" in line.get_label()]
    assert [line.get_marker() == "o" for line in ours] == [len(lengths) == 1] * 2


def test_curves_of_many_lengths_are_thinned_and_end_where_they_end():
    from matplotlib.figure import Figure

    lengths = tuple(range(1, 4321))
    curve = Curve(lengths, tuple(0.5 * s for s in lengths))
    content = Content((), None)
    content.__dict__["cumulative"] = dict.fromkeys(("measured", "predicted", "metp"), curve)
    figure = Figure()
    draw_cumulative(figure, content, Look())
    lines = [line.get_xydata() for line in figure.axes[0].get_lines()]
    assert len(lines) == 3
    for line in lines:
        assert POINTS_OF_LINE / 2 < len(line) <= POINTS_OF_LINE + 1
        assert tuple(line[0]) == (1, 0.5) and tuple(line[-1]) == (4320, 2160)


def test_a_budget_of_nothing_is_drawn(tmp_path):
    trace = write_trace(tmp_path / "t.jsonl", records(2, run={**RUN, "memory_budget_bytes": 0}))
    result = report(trace, "-o", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    assert "Budget 0 MiB" in (tmp_path / "r.html").read_text()


def test_a_trace_of_nothing_but_memory_that_ran_out_is_drawn(tmp_path):
    failed = {**microbatch(1), "kind": "out_of_memory", "memory_margin": 0.03}
    result = report(write_trace(tmp_path / "t.jsonl", [RUN, failed]), "-o", tmp_path / "r.html")
    assert result.exit_code == 0 and "1 figure in" in result.stdout
    assert "1 record of memory that ran out" in (tmp_path / "r.html").read_text()
