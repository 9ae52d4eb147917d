"""Generated session files through all data stages, against pi's rules written down a second time.

The oracle below takes raw JSON lines to the text that a model saw and the turns to train on. It
shares no code with the library: where the two differ, one of them has misread the format.
"""

import json
import re
import unicodedata
from array import array
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
import session_maker as make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_generator import session_files

from workflow_scripts.lib import jsonl, template_proof
from workflow_scripts.split_sessions import split_sessions
from workflow_scripts.tokenize_and_mask import tokenize_and_mask

EXAMPLES = 120
WHOLE = 1 << 20  # tokens: a context that every conversation fits in
CUT_MARK_TOKENS = 30  # at most, of the line that stands for what was cut, and its number
FAILED = ("error", "aborted", "deferred", "pending")
IMAGE = "[image]"
COMPACTED = "The conversation history before this point was compacted into the following summary:"
BRANCHED = "The following is a summary of a branch that this conversation came back from:"
DEFAULT_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
PLAIN = [
    make.header("plain", second=30),
    make.user("p1", None, "A session that shares nothing"),
    make.assistant("p2", "p1", "An answer of its own"),
]


class Turn(NamedTuple):
    """`name`: what tells an eligible assistant turn from all others, None for other turns."""

    role: str
    text: str
    name: tuple | None = None
    calls: tuple = ()
    answers: str | None = None


class Context(NamedTuple):
    """What a model saw by the end of an epoch: its system prompt and its turns."""

    session: str
    system: str | None
    turns: list[Turn]
    new: set[tuple]  # names of the eligible turns after the compaction that opens it


def contexts_of(files: dict[str, bytes], leaves: str, thinking: str) -> list[Context]:
    return [
        context
        for data in files.values()
        for header, lines in sessions_of(data)
        for context in contexts_of_session(header["id"], lines, leaves, thinking)
    ]


def sessions_of(data: bytes) -> list[tuple[dict, list[dict | None]]]:
    """(header, entries after it) of a file; lines that are no JSON count for no position."""
    found: list = []
    for line in data.split(b"\n"):
        try:
            value = mended(json.loads(line.strip(b" \r")))
        except ValueError:
            continue
        if value["type"] == "session":
            found.append((value, []))
        else:
            found[-1][1].append(value)
    return found


def mended(value):
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, list):
        return list(map(mended, value))
    return {k: mended(v) for k, v in value.items()} if isinstance(value, dict) else value


def contexts_of_session(session, lines, leaves, thinking):
    linear = not any("parentId" in line for line in lines)
    if linear:
        entries = dict(enumerate(lines, start=1))
        parents = {number: number - 1 or None for number in entries}
    else:
        entries = {}
        for line in lines:
            entries.pop(line["id"], None)  # the last one of an id counts, at its own place
            entries[line["id"]] = line
        parents = {name: line["parentId"] for name, line in entries.items()}
        parents = {name: above if above in entries else None for name, above in parents.items()}
    paths = []
    for tip in tips_of(entries, parents, linear, leaves):
        path = []
        while tip is not None:
            if tip in path:
                return []  # a cycle: the session is refused
            path.insert(0, tip)
            tip = parents[tip]
        paths.append([(name, entries[name]) for name in path])
    return [each for path in paths for each in contexts_of_path(session, path, linear, thinking)]


def tips_of(entries, parents, linear, leaves) -> list:
    if not entries:
        return []
    last = list(entries)[-1]
    moved = entries[last]["type"] == "leaf" and not linear
    tips = [entries[last]["targetId"] if moved else last]
    if leaves == "all":
        with_children = set()
        for name, above in parents.items():
            if entries[name]["type"] != "leaf" or linear:
                seen = set()
                while above in entries and entries[above]["type"] == "leaf" and above not in seen:
                    with_children.add(above)
                    seen.add(above)
                    above = parents[above]
                with_children.add(above)
        ends = [n for n in entries if n not in with_children and entries[n]["type"] != "leaf"]
        tips += [name for name in ends if name not in tips]
    return [tip for tip in tips if tip in entries]


def contexts_of_path(session, path, linear, thinking):
    starts = [place for place, (_, entry) in enumerate(path) if entry["type"] == "compaction"]
    for start, stop in pairwise([None, *starts, len(path)]):
        system, turns, new = None, [], range(stop)
        visible = range(stop)
        if start is not None:
            compaction = path[start][1]
            turns.append(Turn("user", wrapped(COMPACTED, compaction["summary"] + "\n")))
            new = range(start + 1, stop)
            kept = start
            if "retainedTail" in compaction:
                turns += [
                    turn_of(None, {"message": m}, thinking) for m in compaction["retainedTail"]
                ]
            elif linear:
                at = compaction["firstKeptEntryIndex"]
                kept = at - 1 if 0 < at <= start else start
            else:
                before = [name for name, _ in path[:start]]
                if compaction["firstKeptEntryId"] in before:
                    kept = before.index(compaction["firstKeptEntryId"])
            visible = [*range(kept, start), *new]
        prompts = [place for place in range(stop) if is_system(path[place][1])]
        later = [place for place in prompts[1:] if place in visible]
        sections = {}
        for place in prompts:
            if place not in later:
                sections |= sections_of(path[place][1]["message"])
        system = "\n\n".join(text for text in sections.values() if text.strip()) or None
        names = set()
        for place in visible:
            entry = path[place][1]
            turn = change_of(entry["message"]) if place in later else None
            turn = turn or turn_of(session, entry, thinking)
            if turn and place not in new:
                turn = turn._replace(name=None)
            elif turn and turn.name:
                names.add(turn.name)
            turns.append(turn)
        turns = paired([turn for turn in turns if turn])
        if turns and turns[0].role == "system" and system is None:
            system = turns.pop(0).text
        yield Context(session, system, turns, names)


def is_system(entry) -> bool:
    return entry["type"] == "message" and entry["message"]["role"] == "system"


def sections_of(message) -> dict:
    return {"content": message["content"]} if message["content"] else message["sections"]


def change_of(message) -> Turn | None:
    parts = [text for text in sections_of(message).values() if text.strip()]
    for verb in ("Added", "Removed"):
        if tools := message.get(f"tools{verb}"):
            names = [tool["name"] if isinstance(tool, dict) else tool for tool in tools]
            parts.append(f"Tools {verb.lower()}: {names[0]}.")
    return Turn("system", "\n\n".join(parts))


def wrapped(words: str, summary: str) -> str:
    return f"{words}\n\n<summary>\n{summary}</summary>"


def turn_of(session, entry, thinking) -> Turn | None:
    """The turn of an entry, if it makes one; compactions and system messages are not seen here."""
    message = entry.get("message") or {}
    role = message.get("role")
    if entry.get("type") == "custom_message" or role == "user":
        text = said(message.get("content", entry.get("content")))
        return Turn("user", text) if text.strip() else None
    if entry.get("type") == "branch_summary":
        return Turn("user", wrapped(BRANCHED, entry["summary"])) if entry["summary"] else None
    if role == "bashExecution":
        return None if message.get("excludeFromContext") else Turn("user", ran(message))
    if role == "toolResult":
        return Turn("tool", said(message["content"]), answers=message["toolCallId"])
    if role == "assistant":
        return answer_of(session, entry, thinking)
    return None


def said(content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(b["text"] if b["type"] == "text" else IMAGE for b in content or ())


def ran(message) -> str:
    output = f"```\n{message['output']}\n```" if message["output"] else "(no output)"
    code = "\n\nCommand exited with code 1" if message["exitCode"] else ""
    end = "\n\n(command cancelled)" if message["cancelled"] else code
    return f"Ran `{message['command']}`\n{output}{end}"


def answer_of(session, entry, thinking) -> Turn | None:
    message = entry["message"]
    stop = message.get("stopReason", "stop")
    content = message["content"] or []
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [b["text"] for b in blocks if b["type"] == "text" and b["text"].strip()]
    calls = [b for b in blocks if b["type"] == "toolCall"]
    if stop in FAILED or not (texts or calls):
        return None
    words, good = "\n".join(texts).strip(), True
    thoughts = [b["thinking"] for b in blocks if b["type"] == "thinking" and not b.get("redacted")]
    thought = "\n".join(thoughts).strip() if thinking == "keep" else ""
    if thought:
        words = f"<think>\n{thought}\n</think>\n\n{words}".strip()
    parts = [words] if words else []
    for call in calls:
        arguments = call["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = mended(json.loads(arguments))
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            arguments, good = {}, False
        written = json.dumps(arguments, ensure_ascii=False)
        parts.append(
            f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {written}}}\n</tool_call>'
        )
    text = "\n".join(parts)
    time = message.get("timestamp") or entry.get("timestamp")
    eligible = session is not None and good and stop in ("stop", "toolUse")
    # The thoughts are no part of what tells turns apart: a copy may have lost them.
    name = (time, text) if eligible else None
    return Turn("assistant", text, name, tuple(call["id"] for call in calls))


def paired(turns: list[Turn]) -> list[Turn]:
    """Results behind their calls: the first of the nearest call before it that has its id."""
    found, owners = {}, {}
    for place, turn in enumerate(turns):
        owners |= {call: (place, call) for call in turn.calls}
        if turn.role == "tool" and turn.answers in owners:
            found.setdefault(owners[turn.answers], turn)
    others = [place for place, turn in enumerate(turns) if turn.role != "tool"]
    ordered = []
    for place in others:
        ordered.append(turns[place])
        for call in turns[place].calls:
            if (place, call) in found:
                ordered.append(found[place, call])
            elif place != others[-1]:
                ordered.append(Turn("tool", "No result provided"))
    return ordered


def written(context: Context) -> list[tuple[str, Turn | None]]:
    """(text, assistant turn) of each block that Qwen 2.5's template writes, the opening first."""
    system = DEFAULT_PROMPT if context.system is None else context.system
    blocks = [(f"system\n{system}", None)]
    for before, turn in pairwise([None, *context.turns]):
        if turn.role == "tool":
            result = f"\n<tool_response>\n{turn.text}\n</tool_response>"
            opened = before is not None and before.role == "tool"
            text = blocks.pop()[0] + result if opened else "user" + result
            blocks.append((text, None))
        else:
            blocks.append((f"{turn.role}\n{turn.text}", turn if turn.name else None))
    whole = [f"<|im_start|>{text}<|im_end|>\n" for text, _ in blocks]
    return [
        (unicodedata.normalize("NFC", text), turn)
        for text, (_, turn) in zip(whole, blocks, strict=True)
    ]


class Run(NamedTuple):
    conversations: list[dict]
    stats: dict
    rows: dict[str, list[dict]]
    figures: dict


def run(folder, model_folder, files, leaves, context, **choices) -> Run | None:
    """All stages with a session more that shares nothing, so that there are two families."""
    every = files | {"plain.jsonl": make.to_bytes(PLAIN)}
    conversations, _, stats = make.read(folder, every, leaves)
    if stats["supervised_turns"] < 2:
        return None
    sides = [folder / f"{side}.jsonl" for side in ("train", "val")]
    split_sessions(folder / "conversations.jsonl", *sides, val_rows=2, seed=1)
    return Run(conversations, stats, *rows_of(folder, model_folder, context, **choices))


def rows_of(folder, model_folder, context, **choices):
    outputs = [folder / f"out/{name}" for name in ("train.jsonl", "val.jsonl", "stats.json")]
    sides = [folder / f"{side}.jsonl" for side in ("train", "val")]
    tokenize_and_mask(*sides, model_folder, *outputs, context=context, **choices)
    rows = {path.stem: list(jsonl.read_jsonl(path)) for path in outputs[:2]}
    return rows, jsonl.read_json(outputs[2])


class Tokens(NamedTuple):
    """The small tokenizer, with the numbers of the tokens that structure is made of."""

    tokenizer: object
    start: int
    end: int

    def __repr__(self) -> str:
        return "Tokens(...)"

    def text(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def blocks(self, row) -> list[slice]:
        """Where the blocks of a row lie: each begins with the one token that opens a turn."""
        at = [n for n, number in enumerate(row["input_ids"]) if number == self.start]
        assert at[0] == 0
        return [slice(*ends) for ends in pairwise([*at, len(row["input_ids"])])]

    def ids_of_blocks(self, row) -> tuple[list[int], list[list[int]]]:
        opening, *blocks = [row["input_ids"][block] for block in self.blocks(row)]
        return opening, blocks

    def supervised(self, rows) -> list[list[int]]:
        """The supervised tokens of some rows, turn by turn; a last turn may lack its end."""
        turns: list[list[int]] = [[]]
        for row in rows:
            for label in row["labels"]:
                if label != -100:
                    turns[-1].append(label)
                    turns += [[]] if label == self.end else []
        return turns if turns[-1] else turns[:-1]


@pytest.fixture(scope="module")
def tokens(prepared) -> Tokens:
    added = prepared.coder.added
    return Tokens(prepared.tokenizer, added["<|im_start|>"], added["<|im_end|>"])


@pytest.fixture(scope="module", autouse=True)
def template_proven_once():
    """The proof of the template, the same each time, takes longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_proof, "load_chat", cache(template_proof.load_chat))
        yield


def check_row(row, context, tokens):
    ids, labels = row["input_ids"], row["labels"]
    assert len(ids) == len(labels) <= context
    assert labels[0] == -100
    assert any(label != -100 for label in labels)
    assert all(label in (-100, number) for number, label in zip(ids, labels, strict=True))
    for block in tokens.blocks(row):
        if any(label != -100 for label in labels[block]):
            assert tokens.text(ids[block]).startswith("<|im_start|>assistant\n")
            first = next(n for n, label in enumerate(labels[block]) if label != -100)
            last = max(n for n, label in enumerate(labels[block]) if label != -100)
            assert -100 not in labels[block][first : last + 1]
            assert ids[block].count(tokens.end) == (labels[block][last] == tokens.end)
        else:
            assert ids[block].count(tokens.end) == 1


def check_whole(row, contexts, tokens, tools) -> list[tuple]:
    """A row that nothing was cut from is the beginning of one context; names of what it trains."""
    texts = [tokens.text(row["input_ids"][block]) for block in tokens.blocks(row)]
    for context in contexts:
        blocks = written(context)[: len(texts)]
        if context.session != row["session"]:
            continue
        if [text for text, _ in blocks][tools:] != texts[tools:]:
            continue
        trained = []
        for place, (text, turn) in zip(tokens.blocks(row), blocks, strict=True):
            own = [label for label in row["labels"][place] if label != -100]
            if not own:
                continue
            if not turn:
                break
            body = text.removeprefix("<|im_start|>assistant\n").removesuffix("\n")
            assert tokens.text(own) == body
            trained.append(turn.name)
        else:
            return trained
    raise AssertionError(f"no context of {row['session']} begins with {texts}")


def check_part(row, wholes, tokens):
    """Each block of a row is one of one uncut row, in its order, or a shortened one of these."""
    first, blocks = tokens.ids_of_blocks(row)
    for session, opening, theirs in wholes:
        if session == row["session"] and is_part(first, opening, tokens):
            waiting = iter(theirs)
            if all(any(is_part(block, their, tokens) for their in waiting) for block in blocks):
                return
    raise AssertionError(f"{tokens.text(row['input_ids'])!r} is part of no uncut row")


def is_part(ids, of, tokens) -> bool:
    if ids == of:
        return True
    if len(ids) >= len(of) or ids[:2] != of[: len(ids[:2])]:
        return False
    head = next((n for n, (a, b) in enumerate(zip(ids, of, strict=False)) if a != b), len(ids))
    ends = zip(reversed(ids), reversed(of), strict=False)
    tail = next((n for n, (a, b) in enumerate(ends) if a != b), len(ids))
    marked = "tokens cut" in tokens.text(ids)
    if head + tail >= len(ids) - CUT_MARK_TOKENS * marked:
        return True
    # Or a stretch of a long answer behind its header.
    header = next(n for n, number in enumerate(ids) if tokens.text([number]).endswith("\n")) + 1
    return ids[:header] == of[:header] and as_bytes(ids[header:]) in as_bytes(of)


def as_bytes(ids) -> bytes:
    return array("I", ids).tobytes()


def check_split(result: Run, files):
    """No family is on both sides, as far as headers tell; turns are seen to in another place."""
    sides = [{row["session"] for row in rows} for rows in result.rows.values()]
    assert all(sides)
    families: list[set] = []
    for header, _ in (each for data in files.values() for each in sessions_of(data)):
        parent = header.get("parentSession") or header.get("branchedFrom") or header["id"]
        family = {header["id"], parent.split("_")[-1]}
        joined = [other for other in families if other & family]
        families = [other for other in families if not other & family]
        families.append(family.union(*joined))
    assert not any(all(side & family for side in sides) for family in families)
    assert not sides[0] & sides[1]


choices = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["windows", "windows", "turns"]),
        "overlong": st.sampled_from(["cut", "drop"]),
        "thinking": st.sampled_from(["drop", "keep"]),
        "tools": st.booleans(),
        "repeated_context": st.sampled_from([0.25, 0.5]),
    }
)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    files=session_files(),
    leaves=st.sampled_from(["active", "all"]),
    context=st.sampled_from([64, 100, 256, 1000]),
    choices=choices,
)
def test_every_eligible_turn_once_and_nothing_else(
    tmp_path_factory, model_folder, tokens, files, leaves, context, choices
):
    folder = tmp_path_factory.mktemp("run")
    result = run(folder, model_folder, files, leaves, WHOLE, **choices | {"strategy": "windows"})
    contexts = contexts_of(files | {"plain": make.to_bytes(PLAIN)}, leaves, choices["thinking"])
    eligible = {name for context in contexts for name in context.new}
    if result is None:
        assert len(eligible) < 2
        return
    assert result.stats["supervised_turns"] == len(eligible)
    check_split(result, files)
    trained = Counter()
    for row in [*result.rows["train"], *result.rows["val"]]:
        check_row(row, WHOLE, tokens)
        trained.update(check_whole(row, contexts, tokens, choices["tools"]))
    assert trained == Counter(eligible)

    try:
        rows, figures = rows_of(folder, model_folder, context, **choices)
    except ValueError as error:
        if "no row with a supervised token" not in str(error):
            raise
        assert (choices["strategy"], choices["overlong"]) == ("turns", "drop")
        return
    for side, wholes in result.rows.items():
        turns = tokens.supervised(wholes)
        parts = [(row["session"], *tokens.ids_of_blocks(row)) for row in wholes]
        figure = figures[side]
        for row in rows[side]:
            check_row(row, context, tokens)
            check_part(row, parts, tokens)
        assert figure["rows"] == len(rows[side])
        lost = figure["cut"].get("answer-end-supervised-tokens", 0)
        lost += figure["dropped"].get("overlong-row-supervised-tokens", 0)
        assert figure["supervised_tokens"] == sum(map(len, turns)) - lost
        if choices["strategy"] == "windows":
            assert lost == 0
            assert tokens.supervised(rows[side]) == turns
        elif choices["overlong"] == "cut":
            shown = [tokens.supervised([row]) for row in rows[side]]
            assert [len(each) for each in shown] == [1] * len(turns)
            assert [each for [each] in shown] == [
                turn[: len(each)] for turn, [each] in zip(turns, shown, strict=True)
            ]
        else:
            assert figure["dropped"].get("overlong-row", 0) + len(rows[side]) == len(turns)
            waiting = iter(turns)
            assert all(each in waiting for row in rows[side] for each in tokens.supervised([row]))


@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True)
@given(files=session_files(), leaves=st.sampled_from(["active", "all"]))
def test_names_and_order_of_files_change_nothing(tmp_path_factory, files, leaves):
    def read(named):
        conversations, rejected, stats = make.read(tmp_path_factory.mktemp("run"), named, leaves)
        records = [*conversations, *rejected]
        return sorted(json.dumps(record | {"file": ""}) for record in records), stats

    renamed = {f"x{9 - n}.jsonl": data for n, data in enumerate(files.values())}
    assert read(files) == read(dict(reversed(renamed.items())))
