"""The command that tries the runs of a study again that did not end well."""

import json
import os
import shlex
from collections.abc import Iterable, Mapping


def retry_command(
    rows: Mapping[str, dict | None],
    results: str,
    configfiles: Iterable[str] = (),
    config: Mapping[str, object] | None = None,
) -> str | None:
    """Return the text to show below a study: which runs are not "ok", and the command for them.

    `rows` are the runs' rows by their folders, None for a run without one, which needs no command:
    the study's own makes it. Returns None when all are well.
    """
    again = {run: row["status"] for run, row in rows.items() if row and row.get("status") != "ok"}
    if not again:
        return None
    words = ["snakemake", "--cores", "1", "all", "-R"]
    words += [f"{results}/runs/{run}/row.json" for run in again]
    if config:
        words += ["--config", *(f"{key}={_as_argument(value)}" for key, value in config.items())]
    if files := [_from_here(file) for file in configfiles]:
        words += ["--configfile", *files]
    ended = ", ".join(f"{run} ({status})" for run, status in again.items())
    return f"Not ok: {ended}. To try them again:\n{shlex.join(words)}"


def _as_argument(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _from_here(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
