"""Puts each tool result next to its call, in the order of the calls, one result a call.

pi pairs them the same way when it builds a request (normalizeToolResults, transformMessages).
"""

NO_RESULT = "No result provided"
DROPPED = ("result-without-call", "second-result")


def pair(turns: list[dict]) -> tuple[list[dict], list[tuple[str, str]]]:
    """Return the turns with results beside their calls, and notes (what, entry id).

    A result belongs to the nearest preceding turn with a call of its id, there to the first such
    call that has none yet. One without a call, or one too many, is dropped; a call without one gets
    a placeholder if the conversation goes on. Notes are those of DROPPED, displaced-result and
    placeholder-result.
    """
    results: dict[tuple[int, int], dict] = {}
    latest: dict[str, list[tuple[int, int]]] = {}
    notes, place_of = [], {}
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant":
            own: dict[str, list[tuple[int, int]]] = {}
            for number, call in enumerate(turn["calls"]):
                own.setdefault(call["id"], []).append((place, number))
            latest |= own
        elif turn["role"] == "tool":
            owners = latest.get(turn["call"])
            owner = next((each for each in owners or () if each not in results), None)
            if owners is None:
                notes.append(("result-without-call", turn["entry"]))
            elif owner is None:
                notes.append(("second-result", turn["entry"]))
            else:
                results[owner] = turn
                place_of[owner] = place
    last = max((n for n, turn in enumerate(turns) if turn["role"] != "tool"), default=-1)
    paired = []
    for place, turn in enumerate(turns):
        if turn["role"] == "tool":
            continue
        paired.append(turn)
        if turn["role"] != "assistant":
            continue
        expected = place
        for number, call in enumerate(turn["calls"]):
            owner = (place, number)
            if owner in results:
                expected += 1
                if place_of[owner] != expected:
                    notes.append(("displaced-result", results[owner]["entry"]))
                    expected = place_of[owner]
                result = results[owner]
                paired.append(result if result["name"] else {**result, "name": call["name"]})
            elif place < last:
                notes.append(("placeholder-result", turn["entry"]))
                paired.append(_placeholder(call, turn["entry"]))
    return paired, notes


def _placeholder(call: dict, entry: str) -> dict:
    return {
        "role": "tool",
        "call": call["id"],
        "name": call["name"],
        "text": NO_RESULT,
        "error": True,
        "entry": entry,
    }
