"""Reads the script files: small projects in plain text, and what was said and done in sessions.

A line `=== project NAME` or `=== session NAME` opens a part; `--- WORD rest` opens a step in it,
whose body is all lines up to the next such line. README.md lists the words.
"""

from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    word: str  # user, agent, think, read, bash, ...
    rest: str  # what follows the word on its line
    body: str  # the lines below, joined by newlines, without trailing blank lines


class Play(NamedTuple):
    """One session: its header lines as a dictionary, its steps, and its project's files."""

    name: str
    project: str
    header: dict[str, str]
    steps: list[Step]
    files: list[Step]


def read_script(path: Path) -> list[Play]:
    """The sessions of one script file. Raises ValueError for a misplaced line."""
    project, files, plays = "", [], []
    for kind, name, header, steps in _parts(path):
        if kind == "project":
            project, files = name, steps
        else:
            plays.append(Play(name, project, header, steps, files))
    return plays


def _parts(path: Path) -> list[tuple[str, str, dict[str, str], list[Step]]]:
    parts = []
    body = None
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.startswith("=== "):
            kind, name = line[4:].split(" ", 1)
            parts.append((kind, name, {}, []))
            body = None
        elif line.startswith("--- "):
            word, _, rest = line[4:].partition(" ")
            body = []
            parts[-1][3].append((word, rest, body))
        elif body is not None:
            body.append(line)
        elif parts and line:
            key, _, value = line.partition(" ")
            parts[-1][2][key] = value
        elif line:
            raise ValueError(f"{path.name}, line {number}: expected '=== project', found {line!r}")
    return [(k, n, h, [Step(w, r, _joined(b)) for w, r, b in s]) for k, n, h, s in parts]


def _joined(lines: list[str]) -> str:
    end = len(lines)
    while end and not lines[end - 1].strip():
        end -= 1
    return "\n".join(lines[:end])
