"""Rule snapshot_sessions: copies session files into raw/, the only reader of the outside."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from workflow_scripts.lib import folders, joblog, jsonl, pool, session_sources
from workflow_scripts.lib import redact as redaction

SAMPLE_SESSIONS = Path(session_sources.__file__).parents[2] / "sample_sessions"
BYTES_AT_A_TIME = 1 << 20


class Wanted(NamedTuple):
    """A file to copy."""

    name: str
    path: Path
    target: Path
    redact: bool


def snapshot_sessions(
    source: str,
    raw_folder: str | Path,
    manifest_file: str | Path,
    paths: str | list[str] = "~/.pi/agent/sessions",
    repo: str | None = None,
    revision: str | None = None,
    redact: bool = True,
    sample_folder: str | Path = SAMPLE_SESSIONS,
) -> None:
    """Copy the files of a source under their relative names and list them in the manifest.

    source: "sample" (the files of `sample_folder`), "path" (`paths`: files, folders and globs, ~
    allowed) or "hub" (the *.jsonl of dataset `repo` at `revision`). A file that can't be read is
    listed as skipped. With `redact`, secrets are replaced by their kind on the way. Manifest:
    {source, files: [{file, bytes, sha256, redacted: {kind: number}}], skipped: [{file, reason}]},
    sizes and hashes those of the copies, and from the hub repo and commit. Raises ValueError where
    there is nothing to copy.
    """
    origin: dict = {"source": source}
    if source == "sample":
        found, skipped = session_sources.files_of_paths([str(sample_folder)], redact)
    elif source == "path":
        paths = [paths] if isinstance(paths, str) else list(paths)
        found, skipped = session_sources.files_of_paths(paths, redact)
    elif source == "hub":
        folder, commit = session_sources.fetch_dataset(repo, revision)
        found, skipped = session_sources.files_of_paths([str(folder)], redact)
        origin |= {"repo": repo, "commit": commit}
    else:
        raise ValueError(f"sessions.source is {source!r}; expected 'sample', 'path' or 'hub'")

    raw_folder = Path(raw_folder)
    unfinished = raw_folder.with_name(f".{raw_folder.name}.{os.getpid()}.tmp")
    try:
        unfinished.mkdir(parents=True)
        files = []
        wanted = [Wanted(name, path, unfinished / name, redact) for name, path in found.items()]
        wanted.sort()
        processes = pool.processes_for(sum(folders.size_of(path) for path in found.values()))
        copied = pool.in_order(_copy, wanted, processes)
        for entry in joblog.track(copied, "session files", len(wanted)):
            (skipped if "reason" in entry else files).append(entry)
        if not files:
            raise ValueError(
                f"sessions.source {source}: none of the {len(found)} files could be read "
                f"({skipped[0]['file']}: {skipped[0]['reason']})"
            )
        shutil.rmtree(raw_folder, ignore_errors=True)
        os.replace(unfinished, raw_folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    skipped.sort(key=lambda entry: entry["file"])
    jsonl.write_json(manifest_file, {**origin, "files": files, "skipped": skipped})
    size = sum(file["bytes"] for file in files)
    secrets = sum((Counter(file.get("redacted")) for file in files), Counter())
    joblog.say(
        f"{len(files)} session files, {size / 1e6:.1f} MB, {len(skipped)} skipped, "
        f"{secrets.total()} secrets replaced" + "".join(f", {n} {k}" for k, n in secrets.items())
    )


def _copy(wanted: Wanted, _: None) -> dict:
    """Return the manifest's entry of a file, copied or skipped."""
    try:
        return {"file": wanted.name, **_copied(wanted.path, wanted.target, wanted.redact)}
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        with contextlib.suppress(OSError):
            wanted.target.unlink()
        return {"file": wanted.name, "reason": error.strerror or type(error).__name__}


def _copied(path: Path, target: Path, redact: bool) -> dict:
    """Copy what the file held when it was opened; pi may be appending to it meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size, redacted = hashlib.sha256(), 0, Counter()
    with open(path, "rb") as file, open(target, "wb") as copy:
        for lines in _whole_lines(file, os.fstat(file.fileno()).st_size):
            if redact:
                lines, found = redaction.redact(lines)
                redacted += found
            copy.write(lines)
            digest.update(lines)
            size += len(lines)
    counts = {"redacted": dict(sorted(redacted.items()))} if redacted else {}
    return {"bytes": size, "sha256": digest.hexdigest(), **counts}


def _whole_lines(file: IO[bytes], left: int) -> Iterator[bytes]:
    """Read `left` bytes in blocks that end with a line, so that no secret is cut in two."""
    rest: list[bytes] = []
    while left and (part := file.read(min(left, BYTES_AT_A_TIME))):
        left -= len(part)
        end = part.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, part[:end]])
            rest = []
        rest.append(part[end:])
    if last := b"".join(rest):
        yield last


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        snapshot_sessions(
            raw_folder=snakemake.output.raw,
            manifest_file=snakemake.output.manifest,
            **snakemake.params.source,
        )
