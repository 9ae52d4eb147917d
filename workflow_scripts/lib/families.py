"""Families of sessions that must not be split between training and validation, and the split.

Sessions are of one family when a header names the other as its parent, when they share an entry
(id and time) or an assistant turn, when they open with the same turns up to the first answer, or
when they hold the same long answer. The split orders families by a hash of their own content and a
seed.
"""

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from workflow_scripts.lib.turn_keys import content_of, digest

# Shorter answers ("Done.", a call of ls) are the same by chance in sessions that share nothing.
LONG_ANSWER_CHARACTERS = 200
LARGEST_SHARE = 0.1  # of a small corpus that goes to validation


class Family(NamedTuple):
    """Sessions that belong together; `order` depends on their content and the seed alone."""

    sessions: frozenset[str]
    supervised_turns: int
    order: str


def families_of(conversations: Iterable[dict], seed: int) -> list[Family]:
    """Group the sessions of conversation records (read once, none is kept) into families.

    Returned in the order of their hashes, which no other family and no file order changes.
    """
    links = _Links()
    turns: dict[str, int] = {}
    stretches: dict[str, str] = {}
    stems: dict[str, set[str]] = {}
    parents: dict[str, set[str]] = {}
    first: dict[bytes, str] = {}  # session in which a mark was first seen
    for record in conversations:
        session = record["session"]
        stems.setdefault(_stem(record["file"]), set()).add(session)
        parents.setdefault(session, set()).update(record["parents"])
        turns[session] = turns.get(session, 0) + sum(
            turn.get("supervised", False) for turn in record["turns"]
        )
        stretch = _first_stretch(record["turns"])
        stretches[session] = min(stretch, stretches.get(session, stretch))
        for other in {first.setdefault(_hash(mark), session) for mark in _marks(record, stretch)}:
            links.join(f"session {session}", f"session {other}")
    for session, names in parents.items():
        for name in names:
            for alias in aliases_of(name):
                found = stems.get(alias, set()) | ({alias} & turns.keys())
                # A parent that is not here still joins the forks that name it.
                for other in found or {f"absent {alias}"}:
                    links.join(f"session {session}", f"session {other}" if found else other)
    members: dict[str, list[str]] = {}
    for session in turns:
        members.setdefault(links.root(f"session {session}"), []).append(session)
    families = [
        Family(
            frozenset(sessions),
            sum(turns[session] for session in sessions),
            digest(seed, min(stretches[session] for session in sessions)),
        )
        for sessions in members.values()
    ]
    return sorted(families, key=lambda family: (family.order, sorted(family.sessions)))


def validation_sessions(families: list[Family], val_rows: int) -> set[str]:
    """Choose the families of the validation set; the rest is for training.

    In their order, each family is taken that brings the number of supervised turns closer to
    `val_rows` (with one row per turn these are the rows) or to a tenth of all turns, whichever is
    less; if none does, the smallest one. So neither side is empty.
    Raises ValueError with fewer than two families.
    """
    if len(families) < 2:
        count = sum(len(family.sessions) for family in families)
        raise ValueError(
            f"{count} session(s) to split, all of one family (forks, copies, or the same opening "
            "turns), but training and validation need two that share nothing: add sessions of "
            "other work to the session source"
        )
    turns = sum(family.supervised_turns for family in families)
    wanted = min(val_rows, LARGEST_SHARE * turns)
    chosen, have = [], 0
    for family in families:
        after = have + family.supervised_turns
        if abs(after - wanted) < abs(have - wanted) and len(chosen) < len(families) - 1:
            chosen.append(family)
            have = after
    if not chosen:
        chosen = [min(families, key=lambda family: family.supervised_turns)]
    return {session for family in chosen for session in family.sessions}


class _Links:
    """Union-find over names; the smallest name of a group is its root."""

    def __init__(self) -> None:
        self.above: dict[str, str] = {}

    def root(self, name: str) -> str:
        while (above := self.above.get(name, name)) != name:
            self.above[name] = self.above.get(above, above)
            name = above
        return name

    def join(self, one: str, other: str) -> None:
        low, high = sorted((self.root(one), self.root(other)))
        self.above[high] = low
        self.above.setdefault(low, low)


def _marks(record: dict, stretch: str) -> Iterable[str]:
    """Names of what a session must share with no session of the other side."""
    yield f"stretch {stretch}"
    yield from (f"entry {mark}" for mark in record["entries"])
    for turn in record["turns"]:
        if turn["role"] != "assistant":
            continue
        yield "key " + turn["key"]
        size = len(turn["text"]) + sum(len(str(call["arguments"])) for call in turn["calls"])
        if size >= LONG_ANSWER_CHARACTERS:
            yield "answer " + digest(content_of(turn))


def _first_stretch(turns: list[dict]) -> str:
    """Hash of the turns up to and with the first assistant turn."""
    contents = []
    for turn in turns:
        contents.append(content_of(turn))
        if turn["role"] == "assistant":
            break
    return digest("stretch", contents)


def _hash(mark: str) -> bytes:
    """Stand for a mark in few bytes, since a large corpus has millions."""
    return blake2b(mark.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _stem(name: str) -> str:
    return re.split(r"[/\\]", name)[-1].removesuffix(".jsonl")


def aliases_of(parent: str) -> list[str]:
    """Names under which a parent may be known: its basename, or the id after pi's timestamp."""
    stem = _stem(parent)
    _, _, identifier = stem.partition("_")
    return [stem, identifier] if identifier else [stem]
