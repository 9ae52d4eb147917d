"""A session's tree -> conversations: one per compaction epoch of each path that is followed.

pi's context at any time is the latest summary, what it kept, and what came after. The last context
alone would lose most turns of a long session, so each epoch is built as it stood before the next
compaction. Every assistant turn is supervised once: after the compaction that opens its epoch.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from workflow_scripts.lib import observed_tools, system_prompts, tool_results, trees
from workflow_scripts.lib.entries import Session, rejection
from workflow_scripts.lib.messages import Piece, piece_of, piece_of_message, summary
from workflow_scripts.lib.trees import Tree
from workflow_scripts.lib.turn_keys import entry_marks, keys_of

NOT_REMOVED = ("not-in-context", "unknown-type", "system")
SPOILED_CALLS = ("bad-arguments", "nameless-call")


@dataclass
class Tally:
    """Counts over a corpus. Each entry is counted once, in however many conversations it is.

    removed: turns that were on a path and are in no conversation; unsupervised: assistant turns
    kept as context only; changed: what turns no longer show; outside: lines in no conversation.
    """

    lines_used: int = 0
    supervised_turns: int = 0
    turns: Counter = field(default_factory=Counter)
    removed: Counter = field(default_factory=Counter)
    unsupervised: Counter = field(default_factory=Counter)
    changed: Counter = field(default_factory=Counter)
    outside: Counter = field(default_factory=Counter)


class Epoch(NamedTuple):
    """Places in a path: the compaction that opens it (None: no), what it keeps, what is new."""

    number: int
    compaction: int | None
    kept: range
    new: range


def conversations_of(
    session: Session, leaves: str, claimed: set[str], tally: Tally, rejected: list[dict]
) -> Iterator[dict]:
    """Yield the conversations of a session that hold an assistant turn not supervised before.

    The first one lists the marks of all entries of the session, by which forks are found.
    `claimed` holds the keys of the turns supervised so far in the corpus and grows; `tally` and
    `rejected` are complete when the iterator is exhausted.
    """
    tree = trees.link(session)
    tips, warnings = trees.tips(session, tree, leaves)
    rejected += tree.rejected + warnings
    paths = [(tip, trees.path_to(tree, tip)) for tip in tips]
    if any(path is None for _, path in paths):
        lines = len({entry.line for entry in tree.entries}) + 1
        detail = "the parents of its entries form a cycle; the session is left out"
        rejected.append(rejection(session.file, session.line, "cycle", detail, lines))
        return
    pieces = {
        number: piece_of(tree.entries[number].data, tree.entries[number].id)
        for number in sorted({number for _, path in paths for number in path})
    }
    tools = _observed_tools(pieces)
    marks = entry_marks(tree)
    notes: set[tuple[str, str]] = set()
    used: set[int] = set()
    done: set[int] = set()
    for tip, path in paths:
        keys = keys_of(session.id, tree, path, pieces)
        leaf = None if tree.linear else tree.entries[tip].id
        for epoch in epochs_of(tree, path):
            new = [path[place] for place in epoch.new if path[place] in keys]
            supervised = set()
            for number in new:
                why = _why_context_only(tree, pieces, number)
                if not why and claimed.isdisjoint(keys[number]):
                    supervised.add(number)
                    claimed.update(keys[number])
                elif number not in done:
                    tally.unsupervised[why or "supervised-elsewhere"] += 1
            done.update(new)
            if not supervised:
                continue
            record, seen, epoch_notes = _record(tree, path, epoch, pieces, keys, supervised)
            dropped = {entry for what, entry in epoch_notes if what in tool_results.DROPPED}
            used.update(number for number in seen if tree.entries[number].id not in dropped)
            notes.update(epoch_notes)
            record["tools"] = record["tools"] or tools
            tally.turns.update(turn["role"] for turn in record["turns"])
            tally.supervised_turns += len(supervised)
            yield {
                "conversation": f"{session.id}/{leaf or 'v1'}/{epoch.number}",
                "session": session.id,
                "file": session.file,
                "leaf": leaf,
                "epoch": epoch.number,
                "parents": session.parents,
                "entries": marks,
                **record,
            }
            marks = []
    fates = _count(session, tree, pieces, used, notes, tally, rejected)
    if not used:
        rejected.append(_without_conversation(session, fates))


def epochs_of(tree: Tree, path: list[int]) -> list[Epoch]:
    """Cut a path at its compactions."""
    compactions = [
        place
        for place, number in enumerate(path)
        if tree.entries[number].data.get("type") == "compaction"
    ]
    ends = [*compactions, len(path)]
    epochs = [Epoch(0, None, range(0), range(ends[0]))]
    for number, place in enumerate(compactions, start=1):
        kept = range(_first_kept(tree, path, place), place)
        epochs.append(Epoch(number, place, kept, range(place + 1, ends[number])))
    return epochs


def _first_kept(tree: Tree, path: list[int], place: int) -> int:
    """Place of the first entry that a compaction keeps; its own place where it keeps none."""
    data = tree.entries[path[place]].data
    if isinstance(data.get("retainedTail"), list):
        return place
    name = data.get("firstKeptEntryId")
    target = tree.index.get(name) if isinstance(name, str) else tree.kept.get(path[place])
    before = path[:place]
    return before.index(target) if target in before else place


def _record(
    tree: Tree, path: list[int], epoch: Epoch, pieces: dict, keys: dict, supervised: set
) -> tuple[dict, list[int], list[tuple[str, str]]]:
    """Build system, tools and turns of an epoch; also return the entries in it, and notes."""
    turns, seen = [], []
    if epoch.compaction is not None:
        entry = tree.entries[path[epoch.compaction]]
        opening = summary(entry.data, entry.id)
        turns += [opening] if opening else []
        seen.append(path[epoch.compaction])
        tail = entry.data.get("retainedTail")
        for message in tail if isinstance(tail, list) else ():
            piece = (
                piece_of_message(message, entry.id) if isinstance(message, dict) else Piece(None)
            )
            if piece.turn and piece.turn["role"] == "assistant":
                turns.append({**piece.turn, "supervised": False, "key": f"{entry.id}:tail"})
            elif piece.turn:
                turns.append(piece.turn)
    visible = [path[place] for part in (epoch.kept, epoch.new) for place in part]
    prompts = [n for n in path[: epoch.new.stop] if pieces[n].why == "system"]
    deltas = set(prompts[1:]).intersection(visible)
    messages = {number: tree.entries[number].data["message"] for number in prompts}
    system, tools = system_prompts.fold([messages[n] for n in prompts if n not in deltas])
    for number in visible:
        turn = pieces[number].turn
        if number in deltas:
            tools.update(system_prompts.tools_added(messages[number]))
            turn = system_prompts.delta_turn(messages[number], tree.entries[number].id)
        elif turn and turn["role"] == "assistant":
            turn = {**turn, "supervised": number in supervised, "key": keys[number][0]}
        if turn:
            turns.append(turn)
            seen.append(number)
    seen += [number for number in prompts if number not in deltas]
    turns, notes = tool_results.pair(turns)
    record = {"system": system, "tools": [tools[name] for name in sorted(tools)], "turns": turns}
    return record, seen, notes


def _why_context_only(tree: Tree, pieces: dict[int, Piece], number: int) -> str:
    return pieces[number].why or ("invalid-utf8" if tree.entries[number].damaged else "")


def _observed_tools(pieces: dict[int, Piece]) -> list[dict]:
    turns = [piece.turn for piece in pieces.values() if piece.why not in SPOILED_CALLS]
    return observed_tools.inferred(
        [call for turn in turns if turn and "calls" in turn for call in turn["calls"]]
    )


def _without_conversation(session: Session, fates: Counter) -> dict:
    counts = ", ".join(f"{why} {count}" for why, count in sorted(fates.items())) or "no lines"
    detail = f"no assistant turn to train on in session {session.id}: {counts}"
    if fates["other-branch"]:
        detail += "; `sessions.leaves: all` reads the other branches"
    return rejection(session.file, session.line, "no-conversation", detail, lines=0)


def _count(session, tree, pieces, used, notes, tally, rejected) -> Counter:
    """Count what was removed or changed, and return how many lines had which fate."""
    dropped = {entry: what for what, entry in notes if what in tool_results.DROPPED}
    fates: dict[int, str] = {}
    for number, entry in enumerate(tree.entries):
        piece = pieces.get(number)
        if number in used:
            fates[entry.line] = "used"
            tally.changed.update(piece.changed)
            continue
        if piece is None:
            fate = "other-branch"
        elif piece.turn is None and piece.why in NOT_REMOVED:
            fate = piece.why
        elif piece.turn is None or entry.id in dropped:
            fate = "removed"
            tally.removed[piece.why or dropped[entry.id]] += 1
        else:
            fate = "nothing-to-learn"
        fates.setdefault(entry.line, fate)
    for number, piece in pieces.items():
        if piece.why in SPOILED_CALLS or piece.why == "no-message":
            line = tree.entries[number].line
            detail = "a tool call without name, or whose arguments are no object: not trained on"
            if piece.why == "no-message":
                detail = "a message entry whose message is no object; it only links the chain"
            rejected.append(rejection(session.file, line, piece.why, detail, lines=0))
    tally.changed.update(what for what, _ in notes if what not in tool_results.DROPPED)
    tally.outside["header"] += 1
    counts = Counter(fates.values())
    tally.lines_used += counts["used"]
    tally.outside.update({fate: count for fate, count in counts.items() if fate != "used"})
    return counts
