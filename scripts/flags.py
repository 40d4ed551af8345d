"""Writes the table of flags in docs/flags.md, from the settings and the flags made of them.

.venv/bin/python scripts/flags.py
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_paradyse.settings import BY_COST, FIELDS  # noqa: E402
from megatron_paradyse.train.arguments import add_arguments  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
BEGIN, END = "<!-- begin: scripts/flags.py -->\n", "<!-- end: scripts/flags.py -->\n"
HEAD = "| flag | YAML key | default | meaning |\n| --- | --- | --- | --- |\n"
DEFAULT = re.compile(r" \(default(?::? ([^)]+))?\)")  # in a help text
CODE = re.compile(
    r"(?<![\w`/-])(--[a-z][a-z-]*[a-z]|\+offload|\+recompute|[a-z]+:[A-Z]{4,}|[a-z]+_[a-z_]+)"
    r"(?![\w`-])"
)


def table() -> str:
    """Every flag, in the order of --help; then the settings that only a YAML file can give."""
    parser = argparse.ArgumentParser(add_help=False)
    rows = [_row(action) for action in add_arguments(parser)._actions]
    of_flags = {action.dest for action in parser._actions}
    only_yaml = [name for name in FIELDS if f"paradyse_{name}" not in of_flags]
    rows += [_setting_row(name, "-", name, FIELDS[name].metadata["about"]) for name in only_yaml]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page(text: str) -> str:
    """The page with the table written anew."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


def _row(action: argparse.Action) -> tuple[str, ...]:
    name, about = action.dest.removeprefix("paradyse_"), (action.help or "").replace("%%", "%")
    value = "" if action.nargs == 0 else f" {action.metavar or 'NAME'}"
    flag = f"`{action.option_strings[0]}{value}`"
    if name not in FIELDS:
        return flag, "-", "-", _code(about)
    key = f"{name}: {str(action.const).lower()}" if action.nargs == 0 else name
    return _setting_row(name, flag, key, about)


def _setting_row(name: str, flag: str, key: str, about: str) -> tuple[str, ...]:
    default = FIELDS[name].default
    said = [text for text in DEFAULT.findall(FIELDS[name].metadata["about"]) if text]
    if default is None:
        shown = said[0] if said else "none"
    else:
        value = default if isinstance(default, str) else f"{default:g}"
        shown = f"`{str(default).lower() if isinstance(default, bool) else value}`"
    meaning = _code(DEFAULT.sub("", about))
    return flag, f"`{key}`", shown, meaning + (". By cost only" if name in BY_COST else "")


def _code(text: str) -> str:
    return CODE.sub(r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
