"""Checkpoints of a training: whole or refused, safetensors and JSON only.

A checkpoint is a folder `step-000120/` with one safetensors file per group of tensors,
`progress.json`, and `manifest.json`, which is written last and holds size and SHA-256 of the
others: a checkpoint that was torn by a crash doesn't match it.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workflow_scripts.lib.jsonl import read_json, write_json

KEPT = 2  # of the last checkpoints
FORMAT = 1
NAME = re.compile(r"step-(\d+)")

Tensors = Mapping[str, Mapping[str, np.ndarray]]  # group, such as "optimizer" -> name -> array


class Checkpoint(NamedTuple):
    """A good checkpoint: the state after an optimizer step, and what was known by then."""

    folder: Path
    step: int
    progress: dict


def write(folder: str | Path, step: int, identity: dict, tensors: Tensors, progress: dict) -> None:
    """Write the checkpoint of a step and keep the last `KEPT`.

    `identity` is what the run is (settings, data, model), all of it JSON; a checkpoint goes on with
    no other.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    target = folder / f"step-{step:06}"
    temporary = folder / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for group, arrays in tensors.items():
        arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        save_file(arrays, temporary / f"{group}.safetensors")
    write_json(
        temporary / "progress.json",
        {"format": FORMAT, "step": step, "identity": identity, **progress},
    )
    files = {file.name: _fingerprint(file) for file in sorted(temporary.iterdir())}
    for name in files:
        _to_disk(temporary / name)
    write_json(temporary / "manifest.json", {"files": files})
    _to_disk(temporary)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    _to_disk(folder)
    for old in _newest_first(folder)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def latest(
    folder: str | Path,
    identity: dict,
    steps_written: int,
    refuse: Callable[[str], None] = lambda reason: None,
) -> Checkpoint | None:
    """Return the last good checkpoint of a run, or None; `refuse` is told why others are not.

    A checkpoint needs the lines of its steps: so many of them were found.
    """
    for path in _newest_first(Path(folder)):
        try:
            progress = read_whole(path)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            refuse(f"checkpoint {path.name} is damaged: {error}")
            continue
        if difference := differences(progress["identity"], identity):
            refuse(f"checkpoint {path.name} is of another run: {difference}")
            continue
        if progress["step"] > steps_written:
            refuse(f"checkpoint {path.name} has lost the lines of its steps in steps.jsonl")
            continue
        return Checkpoint(path, progress["step"], progress)
    return None


def read_whole(folder: Path) -> dict:
    """Return progress.json of a checkpoint that is as its manifest says.

    Raises ValueError or OSError otherwise.
    """
    files = read_json(folder / "manifest.json").get("files")
    if not isinstance(files, dict) or "progress.json" not in files:
        raise ValueError("its manifest names no files")
    for name, wanted in files.items():
        if _fingerprint(folder / name) != wanted:
            raise ValueError(f"{name} is not what was written")
    progress = read_json(folder / "progress.json")
    if progress.get("format") != FORMAT:
        raise ValueError(f"format {progress.get('format')!r}, expected {FORMAT}")
    return progress


def read_tensors(folder: str | Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the groups of tensors of a checkpoint."""
    from safetensors.numpy import load_file

    return {file.stem: load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))}


def differences(before: dict, now: dict, most: int = 3) -> str:
    """Say in words where two identities differ; "" where they are the same."""
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    texts = [f"{key} was {_short(before.get(key))}, is {_short(now.get(key))}" for key in keys]
    more = len(texts) - most
    return "; ".join(texts[:most]) + (f"; and {more} more" if more > 0 else "")


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(NAME.fullmatch(path.name)[1]), reverse=True)


def _fingerprint(file: Path) -> dict:
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
