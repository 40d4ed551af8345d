"""A page in a real browser: what is wider than the window, what is drawn, what it complains of.

The page goes into a frame of the given width, so that a phone's width can be asked of a browser
whose windows are never so narrow; a script beside the frame writes what it measured.
"""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SECONDS = 120
MEASURE = """
frame.onload = () => {
  const doc = frame.contentDocument, shown = e => e.getBoundingClientRect().width > 0;
  const right = e => e.getBoundingClientRect().right;
  const inside = e => e.closest('.scroll, svg') || right(e) <= doc.documentElement.clientWidth + 1;
  const wide = [...doc.body.querySelectorAll('*')].filter(e => shown(e) && !inside(e));
  const svgs = [...doc.querySelectorAll('svg')].filter(shown);
  const box = e => e.getBoundingClientRect();
  document.getElementById('result').textContent = JSON.stringify({
    overflow: doc.documentElement.scrollWidth - doc.documentElement.clientWidth,
    wide: wide.map(e => e.outerHTML.slice(0, 80)),
    figures: svgs.map(e => [e.parentElement.className, box(e).width, box(e).height]),
    drawn: svgs.map(e => e.querySelectorAll('path, use, rect').length),
  });
};
"""


@functools.cache
def find_browser() -> str | None:
    """A Chromium that starts; None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "--version"], capture_output=True, timeout=SECONDS)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            return path
    return None


def measure(page: str, *, width: int) -> tuple[dict, list[str]]:
    """What the browser measured at a width in pixels, and the lines of its console."""
    browser = find_browser()
    assert browser is not None
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "wrapper.html")
        wrapper.write_text(
            f'<pre id="result"></pre><iframe id="frame" style="border:0;width:{width}px;'
            f'height:9000px"></iframe><script>{MEASURE}frame.srcdoc = {json.dumps(page)}'.replace(
                "</script", "<\\/script"
            )
            + "</script>"
        )
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--enable-logging=stderr", "--virtual-time-budget=5000"]
        command += [f"--user-data-dir={folder}/profile", wrapper.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert result and result[1], done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(result[1])), console
