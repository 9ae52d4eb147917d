"""Where session files come from: paths on this machine, or a dataset repository of the hub."""

import glob
import os
import re
import unicodedata
from pathlib import Path

from workflow_scripts.lib import joblog
from workflow_scripts.lib.redact import redact_text

SUFFIX = ".jsonl"


def files_of_paths(paths: list[str], redact: bool = True) -> tuple[dict[str, Path], list[dict]]:
    """Find session files: {name in raw/: path}, and what is left out as [{file, reason}].

    Each path is a file, a folder (its *.jsonl at any depth) or a glob; ~ is expanded. Names are
    relative to the folder, which itself goes in front where there are several. Names that would
    collide get a number; characters that are no UTF-8 are written as %XX. With `redact`, names lose
    their secrets.
    Raises ValueError where a path matches nothing or nothing is found at all.
    """
    roots, skipped = [], []
    for given in paths:
        expanded = os.path.expanduser(given)
        if os.path.lexists(expanded):
            roots.append(expanded)
            continue
        matches = sorted(glob.glob(expanded, recursive=True, include_hidden=True))
        if not matches:
            kind = "no file matches" if glob.has_magic(expanded) else "there is no"
            raise ValueError(
                f"sessions.paths: {kind} {given}; pi keeps its own in ~/.pi/agent/sessions"
            )
        roots += matches
    folders = [root for root in roots if os.path.isdir(root)]
    found: dict[str, Path] = {}
    taken: set[str] = set()
    seen: set[str] = set()
    for root in roots:
        for path, name in _files_under(root, len(folders) > 1, skipped):
            name = redact_text(_safe(name)) if redact else _safe(name)
            absolute = os.path.abspath(path)
            if absolute in seen:
                continue
            seen.add(absolute)
            if os.path.isfile(path):
                found[_free(name, taken)] = Path(path)
            else:
                skipped.append({"file": name, "reason": "not a file, or a link to nowhere"})
    if not found:
        raise ValueError(
            f"sessions: no {SUFFIX} file in {', '.join(paths) or 'an empty list'}; expected "
            "pi session files, or folders that hold some"
        )
    return found, skipped


def fetch_dataset(repo: str | None, revision: str | None) -> tuple[Path, str]:
    """Download the *.jsonl of a dataset repository; return their folder and the commit's hash.

    A download that was cut off goes on where it stopped. Without a network, what the cache holds
    of that revision is used, and the log says so.
    Raises ValueError with what to do when repository or revision is missing or out of reach.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub_errors

    if not repo or not revision:
        raise ValueError(
            "sessions.source hub needs sessions.repo (owner/name) and sessions.revision (a commit)"
        )
    what = f"dataset {repo} at revision {revision}"
    wanted = {"repo_type": "dataset", "revision": revision, "allow_patterns": [f"*{SUFFIX}"]}
    try:
        commit = HfApi().dataset_info(repo, revision=revision).sha
        folder = Path(snapshot_download(repo, **wanted))
    except hub_errors.RevisionNotFoundError:
        raise ValueError(f"{what}: no such revision; give a commit of the repository") from None
    except hub_errors.GatedRepoError:
        raise ValueError(f"{what}: access must be asked for on its page, then log in") from None
    except hub_errors.RepositoryNotFoundError:
        raise ValueError(
            f"{what}: no such dataset, or a private one (log in with `hf auth login`)"
        ) from None
    except hub_errors.HFValidationError as error:
        raise ValueError(f"{what}: {_one_line(error)}") from None
    except Exception as error:  # offline: many kinds, of the client and of the libraries below it
        try:
            folder = Path(snapshot_download(repo, local_files_only=True, **wanted))
        except Exception:
            raise ValueError(
                f"{what}: the hub is out of reach ({_one_line(error)}) and the cache has no such "
                "download; run this step with a network, or copy the files here and use "
                "sessions.source: path"
            ) from None
        commit = folder.name
        joblog.say(f"{what}: the hub is out of reach; using what the cache holds: {folder}")
    return folder, commit


def _files_under(root: str, with_folder: bool, skipped: list[dict]):
    """Yield (path, name) of a file, or of all *.jsonl below a folder, in order.

    Links to folders are followed, each folder once, so that a circle of links ends; a folder that
    can't be read is added to `skipped`.
    """
    base = os.path.basename(os.path.normpath(root)) or "root"
    if not os.path.isdir(root):
        yield root, base
        return

    def note(error: OSError) -> None:
        name = _safe(os.path.relpath(error.filename, os.path.dirname(os.path.abspath(root))))
        skipped.append({"file": name, "reason": f"a folder that can't be read: {error.strerror}"})

    visited = {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, onerror=note, followlinks=True):
        subfolders.sort()
        for subfolder in tuple(subfolders):
            real = os.path.realpath(os.path.join(folder, subfolder))
            if real in visited:
                subfolders.remove(subfolder)
            visited.add(real)
        for file in sorted(file for file in files if file.endswith(SUFFIX)):
            path = os.path.join(folder, file)
            name = os.path.relpath(path, root)
            yield path, os.path.join(base, name) if with_folder else name


def _safe(name: str) -> str:
    name = name.replace(os.sep, "/")
    return re.sub("[\udc80-\udcff]", lambda byte: f"%{ord(byte[0]) - 0xDC00:02X}", name)


def _free(name: str, taken: set[str]) -> str:
    """Return the name, numbered if a file system that ignores case or composition has it already,
    as those of Macs do; `taken` grows.
    """
    stem, suffix = (name[: -len(SUFFIX)], SUFFIX) if name.endswith(SUFFIX) else (name, "")
    number, free = 1, name
    while (known := unicodedata.normalize("NFC", free).casefold()) in taken:
        number += 1
        free = f"{stem}-{number}{suffix}"
    taken.add(known)
    return free


def _one_line(error: Exception) -> str:
    return redact_text(" ".join(str(error).split()))[:200] or type(error).__name__
