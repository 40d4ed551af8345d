"""What the documentation says, parsed: links, headings, blocks, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("", "bash", "sh", "console")
# The first words of what a reader may type; anything else in a block of code is no command.
PROGRAMS = (
    *("megatron-paradyse", "torchrun", "python", ".venv/bin/python", "make", "pytest"),
    *("pip", "git", "bash", "eval", "printf"),
)
ASSIGNMENT = re.compile(r"[A-Za-z_]+=\S*")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Command:
    """One that a reader may run. output: the lines that the document prints below it."""

    text: str
    output: tuple[str, ...] = ()

    @property
    def expects_error(self) -> bool:
        return bool(self.output) and self.output[0].startswith("error: ")


@dataclass(frozen=True)
class Document:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def _parts(self) -> list[tuple[str, list[str]]]:
        """("text" or a fence's language, lines), in order; indented code has the language ""."""
        parts: list[tuple[str, list[str]]] = [("text", [])]
        fence: str | None = None
        for line in self.text.splitlines():
            mark = re.match(r"( *)```(\w*)", line)
            if mark:
                fence = mark[2] if fence is None else None
                parts.append(("text" if fence is None else fence, []))
            elif fence is not None:
                parts[-1][1].append(line)
            else:
                kind = "" if line.startswith("    ") else "text"
                if parts[-1][0] != kind:
                    parts.append((kind, []))
                parts[-1][1].append(line)
        return parts

    def blocks(self, language: str) -> list[str]:
        """The fenced blocks of a language."""
        return ["\n".join(lines) for kind, lines in self._parts if kind == language]

    @cached_property
    def anchors(self) -> set[str]:
        """Of the headings, as GitHub makes them."""
        found: list[str] = []
        for kind, lines in self._parts:
            for line in lines if kind == "text" else ():
                if re.match(r"#+ ", line):
                    bare = re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower())
                    anchor = bare.strip().replace(" ", "-")
                    again = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", a) is not None
                                for a in found)  # fmt: skip
                    found.append(f"{anchor}-{again}" if again else anchor)
        return set(found)

    @property
    def links(self) -> list[str]:
        """Targets inside this repository."""
        prose = "\n".join("\n".join(lines) for kind, lines in self._parts if kind == "text")
        return [target for target in LINK.findall(prose) if "://" not in target]

    @cached_property
    def commands(self) -> list[Command]:
        """In order: of blocks, and of code between backticks."""
        found: list[Command] = []
        for kind, lines in self._parts:
            if kind in SHELLS:
                found += _block_commands(lines)
            elif kind == "text":
                spans = re.findall(r"`([^`\n]+)`", "\n".join(lines))
                found += [Command(span) for span in spans if _is_command(span)]
        return found


def documents() -> list[Document]:
    others = [ROOT / "CHANGELOG.md", ROOT / "patches/README.md"]
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *others]
    return [Document(path) for path in paths]


def _is_command(text: str) -> bool:
    words = text.split()
    while words and ASSIGNMENT.fullmatch(words[0]) and len(words) > 1:
        words = words[1:]
    return words[0] in PROGRAMS or re.fullmatch(r"(export )?[A-Z_]+=.*", text) is not None


def _block_commands(lines: list[str]) -> Iterator[Command]:
    """With a prompt in the block, lines that have none are output."""
    lines = [line.rstrip() for line in lines]
    prompts = any(line.lstrip().startswith("$ ") for line in lines)
    place = 0
    while place < len(lines):
        line = lines[place].strip()
        place += 1
        if prompts and not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ")
        while text.endswith("\\") and place < len(lines):
            text = f"{text[:-1].rstrip()} {lines[place].strip()}"
            place += 1
        first = place
        while prompts and place < len(lines) and not lines[place].startswith("$ "):
            place += 1
        output = [line for line in lines[first:place] if line] if prompts else []
        if text and _is_command(text):
            yield Command(text, tuple(output))
