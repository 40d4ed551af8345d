"""The page as a reader sees it, in a headless Chromium where one is installed."""

from __future__ import annotations

import pytest

from megatron_paradyse.report.figures import KINDS
from tests.report.browser import find_browser, measure

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium on the PATH (Debian: apt install chromium)"
)


@pytest.mark.parametrize(("width", "shown"), [(390, "narrow"), (1280, "wide")])
def test_every_figure_is_drawn_nothing_overflows_and_the_console_is_silent(made, width, shown):
    measured, console = measure((made[0] / "page.html").read_text(), width=width)
    assert console == []
    assert measured["overflow"] == 0 and measured["wide"] == []
    assert [kind for kind, _, _ in measured["figures"]] == [shown] * len(KINDS)
    assert all(w > 0.6 * min(width, 900) and h > 100 for _, w, h in measured["figures"])
    assert all(count > 15 for count in measured["drawn"])


def test_the_measurement_sees_what_is_too_wide_and_what_fails():
    bad = '<!DOCTYPE html><body><div style="width:900px">x</div><script>nothing()</script></body>'
    measured, console = measure(bad, width=390)
    assert measured["overflow"] > 0 and measured["wide"]
    assert any("nothing is not defined" in line for line in console)
