"""JSON and JSONL files of the workflow: one object a line, UTF-8, written whole or not at all."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file that appears under `path` only when the block ends without an exception.

    The temporary file lies in the same folder, so that the rename stays within one file system.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> int:
    """Write one compact JSON object a line and return how many there were."""
    count = 0
    with atomic_writer(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            count += 1
    return count


def read_jsonl(path: str | Path) -> Iterator[dict]:
    """Yield the objects of a JSONL file of this workflow.

    Raises ValueError naming file and line when a line is not JSON: these files are ours, so a bad
    line means a damaged file, and the message says how to make it again.
    """
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not JSON ({error.msg}); the file is damaged, make it "
                    f"anew: snakemake --cores 1 --force {path} (and your --configfile)"
                ) from None


def write_json(path: str | Path, value: object) -> None:
    """Write one JSON value, indented for people."""
    with atomic_writer(path) as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.write("\n")


def read_json(path: str | Path) -> dict:
    """Read one JSON value; raises ValueError naming the file when it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ValueError(f"{path}: not JSON ({error})") from None
