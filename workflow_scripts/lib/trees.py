"""A session's entries as a tree: links by id (or by order), tips, and the path from tip to root."""

from typing import NamedTuple

from workflow_scripts.lib.entries import Session, rejection
from workflow_scripts.lib.lines import shown


class Entry(NamedTuple):
    """One entry; `parent` is an index into the tree's entries, None for a root."""

    id: str
    line: int
    parent: int | None
    data: dict
    damaged: bool


class Tree(NamedTuple):
    """Linked entries in file order. `kept` maps a v1 compaction to the entry it keeps from."""

    entries: list[Entry]
    index: dict[str, int]
    linear: bool
    kept: dict[int, int]
    rejected: list[dict]


def link(session: Session) -> Tree:
    """Link a session's entries.

    Where no entry has a parentId (version 1, and mislabelled later files) the order links them;
    otherwise ids do, and an entry whose parent is not there is a root, as in pi. Of entries with
    one id the last wins; entries without an id can't be linked and are rejected.
    """
    if not any("parentId" in item.data for item in session.items):
        return _link_by_order(session)
    rejected, items, index = [], {}, {}
    for place, item in enumerate(session.items):
        name = item.data.get("id")
        if not isinstance(name, str) or not name:
            if item.data.get("type") == "leaf":
                items[place] = item
                continue
            detail = "the entry has no id (a string is expected), so nothing can be linked to it"
            rejected.append((item, "missing-id", detail))
            continue
        if name in index:
            earlier = items.pop(index[name])
            detail = (
                f"id {shown(name)} is used again on line {item.line}; the last one counts, as in pi"
            )
            rejected.append((earlier, "duplicate-id", detail))
        items[place], index[name] = item, place
    places = {place: number for number, place in enumerate(items)}
    index = {name: places[place] for name, place in index.items()}
    entries, warnings = [], []
    for item in items.values():
        parent = item.data.get("parentId")
        known = index.get(parent) if isinstance(parent, str) else None
        if known is None and parent is not None and parent != session.id:
            detail = f"parent {shown(parent)} is not in the file; the path begins here, as in pi"
            warnings.append(rejection(session.file, item.line, "unknown-parent", detail, lines=0))
        name = item.data.get("id")
        name = name if isinstance(name, str) else ""
        entries.append(Entry(name, item.line, known, item.data, item.damaged))
    lines = {entry.line for entry in entries}
    for item, reason, detail in rejected:
        # A line split by salvage may hold an entry that is kept beside one that is not.
        cost = 0 if item.line in lines else 1
        lines.add(item.line)
        warnings.append(rejection(session.file, item.line, reason, detail, cost))
    return Tree(entries, index, False, _kept_by_position(session, items.values()), warnings)


def tips(session: Session, tree: Tree, leaves: str) -> tuple[list[int], list[dict]]:
    """Return the tips to follow, the active one first, and warnings.

    The active tip is the last entry of any type; a `leaf` entry moves it (null: to nothing).
    `leaves` is "active" or "all": all adds the other entries that are nobody's parent.
    """
    if leaves not in ("active", "all"):
        raise ValueError(f"leaves is {leaves!r}; expected 'active' or 'all'")
    found, warnings = [], []
    if tree.entries:
        last = tree.entries[-1]
        if last.data.get("type") != "leaf" or tree.linear:
            found.append(len(tree.entries) - 1)
        elif (target := last.data.get("targetId")) is not None:
            if isinstance(target, str) and target in tree.index:
                found.append(tree.index[target])
            else:
                detail = f"the leaf entry points at {shown(target)}, which is not in the file"
                warnings.append(rejection(session.file, last.line, "unknown-leaf", detail, lines=0))
    if leaves == "all":
        parents = {above for number in range(len(tree.entries)) for above in _above(tree, number)}
        for number, entry in enumerate(tree.entries):
            if number not in parents and number not in found and entry.data.get("type") != "leaf":
                found.append(number)
    return found, warnings


def _above(tree: Tree, number: int) -> set[int | None]:
    """What an entry continues: nothing if it is a `leaf`, which only moves the tip."""
    if tree.entries[number].data.get("type") == "leaf" and not tree.linear:
        return set()
    above: set[int | None] = set()
    at = tree.entries[number].parent
    while at not in above:
        above.add(at)
        if at is None or tree.entries[at].data.get("type") != "leaf":
            break
        at = tree.entries[at].parent
    return above


def path_to(tree: Tree, tip: int) -> list[int] | None:
    """Return the entries from the root to a tip, or None where the parents form a cycle."""
    path, at = [], tip
    while at is not None:
        path.append(at)
        if len(path) > len(tree.entries):
            return None
        at = tree.entries[at].parent
    path.reverse()
    return path


def _link_by_order(session: Session) -> Tree:
    entries, index, warnings = [], {}, []
    for number, item in enumerate(session.items):
        name = item.data.get("id")
        name = name if isinstance(name, str) and name else f"v1:{item.line}"
        parent = number - 1 if number else None
        entries.append(Entry(name, item.line, parent, item.data, item.damaged))
        index[name] = number
    if session.version > 1 and entries:
        detail = f"version {session.version}, but no entry has a parentId: read in file order"
        warnings.append(rejection(session.file, session.line, "linear-session", detail, lines=0))
    return Tree(entries, index, True, _kept_by_position(session, session.items), warnings)


def _kept_by_position(session: Session, items) -> dict[int, int]:
    """Resolve v1's firstKeptEntryIndex, which counts parsed lines with the header as 0."""
    items = list(items)
    counted = {
        number: item.data["firstKeptEntryIndex"]
        for number, item in enumerate(items)
        if item.data.get("type") == "compaction"
        and isinstance(item.data.get("firstKeptEntryIndex"), int | float)
    }
    if session.version > 1 or not counted:
        return {}
    places = {item.position: number for number, item in enumerate(items)}
    return {number: places[at] for number, at in counted.items() if at in places}
