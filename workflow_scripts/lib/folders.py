"""Folders that appear whole or not at all, as `jsonl` does for files, and sizes of files."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `path` when the block ends without an error.

    It lies beside `path`, so that the rename stays within one file system; what was at `path` goes
    only once the new folder is complete.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 where it is gone or can't be asked for it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
