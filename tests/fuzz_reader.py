"""Mutates session files in their bytes and in their structure, and reads them.

    python tests/fuzz_reader.py --files 100000 --seed 0 [--like FOLDER]

No file may raise or lose a line. A case depends on the seed and its own number alone, so that
`--only NUMBER` repeats it. `--like` adds the small files of a folder to what is mutated.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from session_maker import (  # noqa: E402
    assistant,
    call,
    compaction,
    entry,
    header,
    linear,
    result,
    to_bytes,
    user,
)

from workflow_scripts.lib import corpus, families  # noqa: E402

GOOD = [header("good"), user("gu", None, "asked"), assistant("ga", "gu", "a good answer")]
SECONDS_BETWEEN_NOTES = 10
LARGEST_LIKED_BYTES = 20_000

TREE = [
    header(parentSession="/x/2026_p.jsonl"),
    entry(
        "message",
        "y",
        None,
        message={
            "role": "system",
            "sections": {"p": "You"},
            "toolsAdded": [{"name": "bash", "description": "d", "parameters": {"type": "object"}}],
        },
    ),
    user("u", "y", [{"type": "text", "text": "q"}, {"type": "image", "data": "aGk="}]),
    assistant("a", "u", "r", [call("c", arguments={"k": [1, 2.5, None]}), call("d")], "toolUse"),
    result("r", "a", "d"),
    result("s", "r", "c"),
    compaction("k", "s", "S", firstKeptEntryId="u"),
    entry("branch_summary", "b", "k", fromId="root", summary="tried"),
    entry("message", "x", "b", message={"role": "bashExecution", "command": "ls", "exitCode": 1}),
    entry("custom_message", "m", "x", customType="t", content="hidden"),
    assistant("o", "m", "other", [{"type": "thinking", "thinking": "hm"}]),
    entry("message", "z0", "m", message={"role": "developer", "toolsRemoved": [{"name": "bash"}]}),
    compaction(
        "n",
        "z0",
        "T",
        retainedTail=[
            {"role": "assistant", "content": [call("e")]},
            {"role": "toolResult", "toolCallId": "e", "content": "out"},
        ],
    ),
    assistant("z", "n", "end", [call("f", arguments='{"k": 1}')], "toolUse"),
    entry("label", "w", "z", targetId="u", label="keep"),
    entry("leaf", "l", "w", targetId="z"),
]
LINEAR = [
    header("v1", None, branchedFrom="/x/2026_p.jsonl"),
    *linear(
        user("1", None, "one"),
        assistant("2", None, "A", [call("c")], "toolUse"),
        result("3", None, "c", "x\u2028\r\n" * 5),
        assistant("4", None, "", stop="error"),
        assistant("5", None, "cut", stop="length"),
        compaction("6", None, "S", firstKeptEntryIndex=3),
        user("7", None, "two"),
        assistant("8", None, "B"),
    ),
]
for _line in LINEAR[4:6]:
    del _line["timestamp"]
BASES = [TREE, LINEAR, [*TREE[:6], *LINEAR, *TREE[6:]]]
VALUES = [
    json.loads("[" * 800 + "]" * 800),
    *(None, 0, -1, 2, 1e308, True, "", "u", "a", "\ud800", "x" * 300, "{}", '{"a":1e999}'),
    *([], [[]], ["u"], {}, {"type": []}, {"role": "assistant", "content": "x"}),
    *("toolUse", "session", "message", "leaf", "compaction", "system", "assistant", "toolResult"),
]
NOISE = [b"\n", b"{", b"}", b'"', b"\\", b",", b"\x00", b"\xff", b"\r", b" ", b"\\ud800", b"\xe2"]


def liked(folder: Path) -> list[list[dict]]:
    """The small, wholly readable files of a folder, as further material to mutate."""
    return [
        [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
        for path in sorted(folder.glob("*.jsonl"))
        if path.stat().st_size <= LARGEST_LIKED_BYTES
    ]


def _copy(value: object) -> object:
    return json.loads(json.dumps(value))  # as deep as JSON goes, which copy.deepcopy does not


def mutated(chance: random.Random, bases: list[list[dict]] = BASES) -> bytes:
    """A session file with up to a few changes in its entries and up to a few in its bytes."""
    lines = _copy(chance.choice(bases))
    if chance.random() < 0.1:
        lines = linear(*lines)
    for _ in range(chance.choice([0, 1, 1, 2, 5])):
        chance.choice([_change_value, _change_value, _relink, _reorder])(chance, lines, bases)
    data = bytearray(to_bytes(lines))
    for _ in range(chance.choice([0, 0, 1, 2, 6])):
        data = _change_bytes(chance, data) or bytearray(b"\n")
    return bytes(data)


def _change_value(chance: random.Random, lines: list[dict], bases) -> None:
    place = chance.choice(lines)
    while chance.random() < 0.6:
        values = place.values() if isinstance(place, dict) else place
        inner = [value for value in values if isinstance(value, dict | list) and value]
        if not inner:
            break
        place = chance.choice(inner)
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    if keys and chance.random() < 0.15:
        del place[chance.choice(keys)]
    elif keys:
        place[chance.choice(keys)] = _copy(chance.choice(VALUES))


def _relink(chance: random.Random, lines: list[dict], bases) -> None:
    """Give an entry another's id, or another's for its parent, kept entry or target."""
    key = chance.choice(["id", "parentId", "parentId", "firstKeptEntryId", "targetId"])
    chance.choice(lines)[key] = chance.choice(lines).get("id")


def _reorder(chance: random.Random, lines: list[dict], bases) -> None:
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    action = chance.randrange(4)
    if action == 0:
        lines[at], lines[to] = lines[to], lines[at]
    elif action == 1:
        lines.insert(at, _copy(lines[to]))
    elif action == 2 and len(lines) > 1:
        del lines[at]
    else:
        lines[at:at] = _copy(chance.choice(bases))[to:]


def _change_bytes(chance: random.Random, data: bytearray) -> bytearray:
    at, action = chance.randrange(len(data)), chance.randrange(9)
    if action == 0:
        data[at] = chance.randrange(256)
    elif action == 1:
        del data[at : at + chance.randrange(1, 200)]
    elif action == 2:
        data[at:at] = b"".join(chance.choices(NOISE, k=chance.randrange(1, 6)))
    elif action == 3:
        data[at:at] = data[: chance.randrange(len(data))]
    elif action == 4:
        data = data[:at]
    elif action == 5:  # glues two lines
        end = data.find(b"\n", at)
        del data[end : end + (end >= 0)]
    elif action == 6:
        data = data.replace(b"\n", b"\r\n")
    elif action == 7:
        data[at:at] = bytes(chance.randrange(1, 400))
    else:
        data[at:at] = data[at : at + 80].decode("utf-8", "replace").encode("utf-16")
    return data


def check(folder: Path, data: bytes, chance: random.Random) -> None:
    """Read a file beside a good one, as the rules do; raises where anything is lost or odd."""
    (folder / "f.jsonl").write_bytes(data)
    (folder / "good.jsonl").write_bytes(to_bytes(GOOD))
    counts, rejected = corpus.Counts(), []
    leaves, salvage = chance.choice(["active", "all"]), chance.random() < 0.5
    names = ["f.jsonl", "good.jsonl"]
    records = list(corpus.read(folder, names, leaves, salvage, counts, rejected.append))
    stats = corpus.stats_of(counts)
    with open(folder / "f.jsonl", "rb") as file:
        lines = sum(1 for _ in file) + len(GOOD)
    parts = stats["lines_used"] + stats["lines_rejected"] + stats["lines_outside"]
    assert parts == stats["lines_read"] == lines, (parts, stats["lines_read"], lines)
    assert sum(record["lines"] for record in rejected) == stats["lines_rejected"]
    assert any(record["file"] == "good.jsonl" for record in records)
    for record in [*records, *rejected]:
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    turns = [turn for record in records for turn in record["turns"]]
    keys = [turn["key"] for turn in turns if turn.get("supervised")]
    assert len(set(keys)) == len(keys) == stats["supervised_turns"]
    families.families_of(records, 0)


def case(seed: int, number: int, bases: list[list[dict]]) -> tuple[bytes, random.Random]:
    chance = random.Random(f"{seed}/{number}")
    return mutated(chance, bases), chance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of one case to repeat")
    parser.add_argument("--like", type=Path, help="folder of session files to mutate too")
    given = parser.parse_args()
    bases = BASES + (liked(given.like) if given.like else [])
    numbers = range(given.files) if given.only is None else [given.only]
    started = noted = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            data, chance = case(given.seed, number, bases)
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # the reader says a line a file
                    check(Path(folder), data, chance)
            except BaseException:
                like = f" --like {given.like}" if given.like else ""
                print(f"fails: --seed {given.seed} --only {number}{like}; the file is\n{data!r}")
                raise
            now = time.monotonic()
            if now - noted > SECONDS_BETWEEN_NOTES:
                noted = now
                print(f"{number + 1} of {len(numbers)} files, {now - started:.0f} s", flush=True)
    seconds = time.monotonic() - started
    print(f"{len(numbers)} files read, nothing raised, no line lost, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
