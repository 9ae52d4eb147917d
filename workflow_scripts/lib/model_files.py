"""The files of a model that a training needs, from the hub or a folder: safetensors, never pickles.

Pickled weights and code run what they hold when they are loaded; so neither is ever taken.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from workflow_scripts.lib import joblog, jsonl

WANTED = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
PICKLES = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle"]
BELOW = ["*/*"]  # what lies in subfolders: other formats of the same weights
NEEDED = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def wanted_of(names: Iterable[str], where: str) -> list[str]:
    """Return which of a model's files to take, those in subfolders never.

    Raises ValueError naming what is missing: the weights as safetensors, or one of NEEDED.
    """
    top = sorted(name for name in names if "/" not in name)
    wanted = [name for name in top if any(fnmatch(name, pattern) for pattern in WANTED)]
    if not any(name.endswith(".safetensors") for name in wanted):
        pickles = [name for name in top if any(fnmatch(name, pattern) for pattern in PICKLES)]
        found = f"only pickled weights ({', '.join(pickles[:3])})" if pickles else "no weights"
        raise ValueError(
            f"{where}: {found}; expected *.safetensors. Pickles can run code and are never "
            "loaded: take a model that offers safetensors"
        )
    missing = [name for name in NEEDED if name not in wanted]
    if missing:
        raise ValueError(
            f"{where}: no {', '.join(missing)}; expected an ordinary Hugging Face model folder"
        )
    return wanted


def fetch_from_hub(repo: str, revision: str) -> tuple[Path, list[str], str]:
    """Return (folder in the hub's cache, files to take, commit); a broken download goes on.

    Without a network, what the cache holds of that revision is used, and the log says so. Raises
    ValueError in one line where repository, revision, files or network are missing.
    """
    from huggingface_hub import HfApi, snapshot_download

    what = f"model {repo} at revision {revision}"
    try:
        info = HfApi().model_info(repo, revision=revision)
    except Exception as error:  # offline: many kinds, of the client and of the libraries below it
        return _from_cache(repo, revision, what, error)
    names = wanted_of((file.rfilename for file in info.siblings or []), what)
    try:
        folder = snapshot_download(
            repo, revision=info.sha, allow_patterns=names, ignore_patterns=BELOW
        )
    except Exception as error:
        return _from_cache(repo, info.sha, what, error)
    return Path(folder), names, info.sha


def _from_cache(
    repo: str, revision: str, what: str, error: Exception
) -> tuple[Path, list[str], str]:
    from huggingface_hub import errors, snapshot_download

    for kind, meaning in (
        (errors.RevisionNotFoundError, "no such revision; give a commit, tag or branch of it"),
        (errors.GatedRepoError, "ask for access on its page, then log in with `hf auth login`"),
        (errors.RepositoryNotFoundError, "no such model, or a private one (`hf auth login`)"),
        (errors.HFValidationError, _one_line(error)),
    ):
        if isinstance(error, kind):
            raise ValueError(f"{what}: {meaning}") from None
    try:
        wanted = {"allow_patterns": WANTED, "ignore_patterns": BELOW, "local_files_only": True}
        folder = Path(snapshot_download(repo, revision=revision, **wanted))
        names = wanted_of((path.name for path in folder.iterdir()), str(folder))
        _check_shards(folder, names)
    except Exception:
        raise ValueError(
            f"{what}: the hub is out of reach ({_one_line(error)}) and the cache does not hold it "
            "whole; run this step with a network, or take `source: path`"
        ) from None
    joblog.say(f"{what}: the hub is out of reach; using what the cache holds: {folder}")
    return folder, names, folder.name


def find_in_folder(path: str) -> tuple[Path, list[str]]:
    """Return (folder, files to take); raises ValueError where there is no such model folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"path: there is no folder {folder}; expected a Hugging Face model folder")
    names = wanted_of((file.name for file in folder.iterdir() if file.is_file()), str(folder))
    return folder, [name for name in names if name != "source.json"]


def take(source: Path, names: list[str], folder: Path, origin: dict) -> None:
    """Put files into a model folder, and source.json: where they are from, and their SHA-256.

    Weights in the hub's cache are linked where the file system can: they are large, and that cache
    never writes into a file it holds. A person's own folder may change, so it is copied.
    Raises ValueError naming a file that is damaged.
    """
    _check_shards(source, names)
    for name in names:
        _check_whole(source / name)
    hashes = {}
    for name in joblog.track(names, "files"):
        file = (source / name).resolve()
        if name.endswith(".safetensors") and origin["source"] == "hub":
            _link(file, folder / name)
        else:
            shutil.copyfile(file, folder / name)
        with open(file, "rb") as opened:
            hashes[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    jsonl.write_json(folder / "source.json", {**origin, "sha256": hashes})


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _check_shards(folder: Path, names: list[str]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    shards = set(jsonl.read_json(index)["weight_map"].values())
    missing = sorted(shards - set(names))
    if missing:
        raise ValueError(f"{folder}: {index.name} names {', '.join(missing[:3])}, not there")


def _check_whole(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if file.suffix == ".json":
        jsonl.read_json(file)
    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a whole safetensors file ({_one_line(error)}); download or save it again"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
