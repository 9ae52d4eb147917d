"""Makes the sample corpus: plays every session of scripts/*.txt and writes one pi file for each.

The steps are really carried out in scratch folders, so tool results are real output. Times, ids and
token counts are derived from the scripts: the same files come out in every run.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from play import read_script
from session_files import record

HERE = Path(__file__).resolve().parent


def make_sample_sessions(to: Path) -> list[Path]:
    """Play all scripts and replace the *.jsonl in `to`, once everything has been made."""
    scripts = sorted(HERE.glob("scripts/*.txt"))
    plays = {play.name: play for script in scripts for play in read_script(script)}
    with tempfile.TemporaryDirectory(prefix="sample-sessions-") as scratch:
        made = dict(record(play, plays, Path(scratch)) for play in plays.values())
    if len(made) != len(plays):
        raise ValueError("two sessions have one file name")
    to.mkdir(parents=True, exist_ok=True)
    for stale in to.glob("*.jsonl"):
        if stale.name not in made:
            stale.unlink()
    return [_write(to / name, text) for name, text in sorted(made.items())]


def _write(path: Path, text: str) -> Path:
    partial = path.with_suffix(".partial")
    partial.write_bytes(text.encode("utf-8"))
    os.replace(partial, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--to", type=Path, default=HERE, help="folder (default: where this file is)"
    )
    files = make_sample_sessions(parser.parse_args().to)
    size = sum(f.stat().st_size for f in files)
    print(f"{len(files)} sessions, {size / 1000:.0f} KB", file=sys.stderr)


if __name__ == "__main__":
    main()
