"""In which order session files are read, and from which sessions each was forked, by their headers.

An original comes before its forks, since the first one read supervises what they share. The order
depends on what the files hold, never on their names.
"""

from collections import Counter
from hashlib import blake2b
from pathlib import Path

from workflow_scripts.lib import entries, families, folders


def ordered(folder: Path, names: list[str], headers: dict[str, dict]) -> list[str]:
    """Sort by the time and id of the first header; of copies the longest first, then by content."""
    keys = {}
    for name in names:
        size, header = folders.size_of(folder / name), headers[name]
        keys[name] = (str(header.get("timestamp", "")), str(header.get("id", "")), -size)
    alike = Counter(keys.values())
    contents = {name: _digest(folder / name) for name in names if alike[keys[name]] > 1}
    return sorted(names, key=lambda name: (keys[name], contents.get(name, ""), name))


def ancestors_of(headers: dict[str, dict]) -> dict[str, set[str]]:
    """Names of all forebears of a file; the session between two others may be written nowhere."""
    parents = {name: set(entries.parents_of(header)) for name, header in headers.items()}
    known: dict[str, set[str]] = {}
    for name, header in headers.items():
        for alias in (Path(name).name.removesuffix(".jsonl"), header.get("id")):
            if isinstance(alias, str):
                known.setdefault(alias, set()).update(parents[name])
    found = {}
    for name, named in parents.items():
        waiting, reached = list(named), set()
        while waiting:
            parent = waiting.pop()
            if parent not in reached:
                reached.add(parent)
                for alias in families.aliases_of(parent):
                    waiting += known.get(alias, ())
        found[name] = reached
    return found


def _digest(path: Path) -> str:
    found = blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                found.update(part)
    except OSError:
        pass
    return found.hexdigest()
