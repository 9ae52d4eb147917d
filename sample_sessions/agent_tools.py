"""The agent's tools, really carried out in a scratch folder, with the result texts of pi.

Each takes the folder and the call's arguments and returns (content blocks, details or None); what
goes wrong the way it would for an agent is raised as ToolError.
"""

import base64
import difflib
import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

HOME = "/home/dev"  # what the recorded sessions call the folder that holds the projects
CONTEXT_LINES = 4


class ToolError(Exception):
    """A failed call; its text is the tool result."""


def carry_out(name: str, folder: Path, arguments: dict) -> tuple[list[dict], dict | None]:
    """Run one call in `folder`; scratch paths in what it prints become paths below HOME."""
    return TOOLS[name](folder, **arguments)


def shell(folder: Path, command: str) -> tuple[str, int]:
    """Run a command with a fixed environment: (stdout and stderr as one text, exit code)."""
    home = folder.parent.resolve()
    bin_folder = home / ".bin"
    if not bin_folder.exists():
        bin_folder.mkdir()
        wrapper = bin_folder / "python3"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(bin_folder), "/usr/bin", "/bin"]),
        "HOME": str(home),
        "TMPDIR": str(home),
        "LC_ALL": "C",
        "TZ": "UTC",
        "COLUMNS": "80",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHON_COLORS": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder.resolve(),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    text = done.stdout.decode("utf-8", errors="replace")
    return text.replace(str(home), HOME).replace(str(folder.parent), HOME), done.returncode


def bash(folder: Path, command: str) -> tuple[list[dict], None]:
    output, code = shell(folder, command)
    output = output or "(no output)"
    if code:
        raise ToolError(f"{output}\n\nCommand exited with code {code}")
    return _text(output), None


def read(
    folder: Path, path: str, offset: int | None = None, limit: int | None = None
) -> tuple[list[dict], None]:
    data = _existing(folder, path).read_bytes()
    if path.endswith(".png"):
        image = {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": "image/png"}
        return [*_text("Read image file [image/png]"), image], None
    lines = data.decode("utf-8", errors="replace").split("\n")
    start = (offset or 1) - 1
    if start >= len(lines):
        raise ToolError(f"Offset {offset} is beyond end of file ({len(lines)} lines total)")
    chosen = lines[start : start + limit] if limit else lines[start:]
    text = "\n".join(chosen)
    end = start + len(chosen)
    if end < len(lines):
        text += f"\n\n[{len(lines) - end} more lines in file. Use offset={end + 1} to continue.]"
    return _text(text), None


def write(folder: Path, path: str, content: str) -> tuple[list[dict], None]:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.encode("utf-8"))
    return _text(f"Successfully wrote {len(content.encode('utf-8'))} bytes to {path}"), None


def edit(
    folder: Path,
    path: str,
    oldText: str | None = None,  # noqa: N803  (pi's argument names)
    newText: str | None = None,  # noqa: N803
    edits: list[dict] | None = None,
) -> tuple[list[dict], dict]:
    target = _existing(folder, path)
    before = after = target.read_bytes().decode("utf-8")
    for one in edits or [{"oldText": oldText, "newText": newText}]:
        found = before.count(one["oldText"])
        if found == 0:
            raise ToolError(
                f"Could not find the exact text in {path}. The old text must match exactly "
                "including all whitespace and newlines."
            )
        if found > 1:
            raise ToolError(
                f"Found {found} occurrences of the text in {path}. The text must be unique. "
                "Please provide more context to make it unique."
            )
        after = after.replace(one["oldText"], one["newText"], 1)
    target.write_bytes(after.encode("utf-8"))
    said = f"Successfully replaced {len(edits)} block(s) in {path}." if edits else None
    return _text(said or f"Successfully replaced text in {path}."), _diff(before, after)


def grep(
    folder: Path,
    pattern: str,
    path: str = ".",
    glob: str = "*",
    ignoreCase: bool = False,  # noqa: N803
) -> tuple[list[dict], None]:
    wanted = re.compile(pattern, re.IGNORECASE if ignoreCase else 0)
    start = _existing(folder, path)
    hits = []
    for file in [start] if start.is_file() else _files(start):
        if not fnmatch.fnmatch(file.name, glob):
            continue
        shown = file.relative_to(start).as_posix() if start.is_dir() else file.name
        lines = file.read_bytes().decode("utf-8", errors="replace").split("\n")
        hits += [f"{shown}:{n}: {line}" for n, line in enumerate(lines, 1) if wanted.search(line)]
    return _text("\n".join(hits) or "No matches found"), None


def find(folder: Path, pattern: str, path: str = ".") -> tuple[list[dict], None]:
    start = _existing(folder, path)
    names = [f.relative_to(start).as_posix() for f in _files(start)]
    hits = [n for n in names if fnmatch.fnmatch(n.rsplit("/", 1)[-1], pattern)]
    return _text("\n".join(hits) or "No files found matching pattern"), None


def ls(folder: Path, path: str = ".") -> tuple[list[dict], None]:
    entries = sorted(_existing(folder, path).iterdir(), key=lambda p: (p.name.lower(), p.name))
    names = [p.name + ("/" if p.is_dir() else "") for p in entries]
    return _text("\n".join(names) or "(empty directory)"), None


TOOLS = {f.__name__: f for f in (bash, read, write, edit, grep, find, ls)}


def _text(text: str) -> list[dict]:
    return [{"type": "text", "text": text}]


def _existing(folder: Path, path: str) -> Path:
    if not (folder / path).exists():
        raise ToolError(f"ENOENT: no such file or directory, access '{HOME}/{folder.name}/{path}'")
    return folder / path


def _files(folder: Path) -> list[Path]:
    return sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.as_posix())


def _diff(before: str, after: str) -> dict:
    """pi's own diff form: numbered lines marked "+", "-" or " ", "..." where some are left out."""
    old, new = before.split("\n"), after.split("\n")
    width = len(str(max(len(old), len(new))))
    shown, first = [], None
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        if group[0][1] > 0:
            shown.append(f" {'':{width}} ...")
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                shown += [f" {n + 1:{width}} {old[n]}" for n in range(i1, i2)]
                continue
            first = first or j1 + 1
            shown += [f"-{n + 1:{width}} {old[n]}" for n in range(i1, i2)]
            shown += [f"+{n + 1:{width}} {new[n]}" for n in range(j1, j2)]
        if group[-1][2] < len(old):
            shown.append(f" {'':{width}} ...")
    return {"diff": "\n".join(shown), "firstChangedLine": first}
