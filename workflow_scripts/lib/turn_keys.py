"""Identity of an assistant turn across epochs, leaves, forks and copied files.

Forks and copies repeat messages with their time, so the time and content of a turn and of the turn
before it name it. A message without a time is named by everything before it on its path instead:
alone, "Done." is no identity.
"""

import json
from hashlib import blake2b

from workflow_scripts.lib.trees import Entry, Tree

_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def digest(*parts: object) -> str:
    """Hash of JSON-like parts, 16 hexadecimal digits."""
    return blake2b(_encode(parts).encode(), digest_size=8).hexdigest()


def content_of(turn: dict) -> list:
    """What makes two turns the same: role, text and calls, without ids."""
    calls = [[call["name"], call["arguments"]] for call in turn.get("calls", ())]
    return [turn["role"], turn["text"], calls]


def time_of(entry: Entry) -> str | int | float | None:
    """Time of a message, else of its entry, None where there is neither."""
    message = entry.data.get("message")
    time = message.get("timestamp") if isinstance(message, dict) else None
    if not isinstance(time, int | float | str) or not time:
        time = entry.data.get("timestamp")
    return time if isinstance(time, int | float | str) and time else None


def entry_marks(tree: Tree) -> list[str]:
    """Name each entry of a tree by id and time; files that share one are forks or copies."""
    if tree.linear:
        return []
    return [digest("entry", each.id, time_of(each) or each.data) for each in tree.entries]


def keys_of(session: str, tree: Tree, path: list[int], pieces: dict) -> dict[int, tuple[str, ...]]:
    """Keys of the assistant turns of a path, by entry; a turn is known when one of its keys is.

    The first key is the turn's `key` in the records. A second one, of session, entry id and time,
    finds a turn again in a copy of the file whose text was edited, such as a redacted one.
    """
    keys, chain = {}, ""
    assistants = [n for n in path if pieces[n].turn and pieces[n].turn["role"] == "assistant"]
    times = {number: time_of(tree.entries[number]) for number in assistants}
    chained = None in times.values()
    before = None
    for number in path:
        turn = pieces[number].turn
        if turn is None:
            continue
        content, time = content_of(turn), times.get(number)
        if chained:
            chain = digest(chain, content)
        before, previous = content, before
        if turn["role"] != "assistant":
            continue
        if time is None:
            keys[number] = (digest("chain", chain),)
            continue
        keys[number] = (digest("time", time, previous, content),)
        if not tree.linear:
            keys[number] += (digest("id", session, tree.entries[number].id, time),)
    return keys
