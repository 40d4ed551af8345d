"""Names, paths and numbers that would be code or break the page are text."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from tests.report.samples import (
    RUN,
    elements,
    microbatch,
    records,
    report,
    write_costs,
    write_trace,
)

HOSTILE = '"><script>alert(1)<img src=x onerror=alert(2)>$\\frac{1}{2}$ &amp;'


def test_data_that_would_be_code_are_text(tmp_path):
    """In plans, policy, hardware, kinds and file names."""
    name = HOSTILE.replace("/", "").replace(",", "")
    assert "<script>" in name and "onerror" in name
    run = {**RUN, "policy": HOSTILE, "costs": {**RUN["costs"], "hardware": HOSTILE}}
    lines = [*records(3, run=run), microbatch(4, plan=f"1-4 {name}"), {"kind": HOSTILE}]
    trace = write_trace(tmp_path / "<b onclick=x>.jsonl", lines)
    result = report(trace, "-o", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    page = ET.parse(tmp_path / "r.html").getroot()
    assert not elements(page, "script") and not elements(page, "img") and not elements(page, "b")
    assert HOSTILE in "".join(page.itertext())
    assert all(not a.startswith("on") for e in page.iter() for a in e.attrib)
    labels = ["".join(text.itertext()) for text in elements(page, "text")]
    assert any(label.startswith('"><script>') and "$" not in label[:5] for label in labels)


def test_hostile_cost_files_and_paths_are_text(tmp_path):
    """A cost file's hardware, versions and path, and the names of the traces."""
    good = read_cost_file(write_costs(tmp_path / "good.json"))
    description = good.table.description
    hostile = dataclasses.replace(
        description,
        hardware=dataclasses.replace(description.hardware, name=HOSTILE),
        attention_kernel=HOSTILE,
        versions={**description.versions, "x": HOSTILE},
    )
    costs = tmp_path / '"><script>alert(1)<'
    costs.mkdir()
    costs = costs / "onerror=x.json"
    write_cost_file(costs, dataclasses.replace(good.table, description=hostile), good.model)
    trace = write_trace(costs.with_name("'><img src=x onerror=alert(1)>.jsonl"), records(4))
    result = report(trace, "--costs", costs, "-o", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    page = ET.parse(tmp_path / "r.html").getroot()
    assert not elements(page, "script") and not elements(page, "img")
    assert all(not a.lower().startswith("on") for e in page.iter() for a in e.attrib)
    assert "alert(1)" in "".join(page.itertext())


def test_a_trace_whose_name_is_no_text_is_told_escaped(tmp_path):
    trace = write_trace(tmp_path / "t\udcff.jsonl", [*records(2), {"kind": "weather"}])
    result = report(trace, "-o", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    said = "".join(ET.parse(tmp_path / "r.html").getroot().itertext())
    assert said.count(r"t\udcff.jsonl") == 2  # where it is from, and a warning
