"""The shipped corpus is what its program makes, and has every kind of entry that the demo needs."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "sample_sessions"


def sessions():
    """{file name: (header, entries)} of the shipped files."""
    read = {}
    for path in sorted(FOLDER.glob("*.jsonl")):
        lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        header, *entries = [json.loads(line) for line in lines]
        read[path.name] = (header, entries)
    return read


SESSIONS = sessions()
ENTRIES = [entry for _, entries in SESSIONS.values() for entry in entries]
MESSAGES = [entry["message"] for entry in ENTRIES if entry["type"] == "message"]


def versions():
    return Counter(header.get("version", 1) for header, _ in SESSIONS.values())


def blocks(kind):
    lists = [m["content"] for m in MESSAGES if isinstance(m.get("content"), list)]
    return [block for content in lists for block in content if block["type"] == kind]


def calls_of(message):
    return [b for b in message["content"] if b["type"] == "toolCall"]


def test_made_anew_gives_the_shipped_bytes(tmp_path):
    program = FOLDER / "make_sample_sessions.py"
    (tmp_path / "stale.jsonl").write_text("{}\n")
    subprocess.run([sys.executable, str(program), "--to", str(tmp_path)], check=True)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in FOLDER.glob("*.jsonl")}
    assert sorted(made) == sorted(shipped)
    assert [name for name in made if made[name] != shipped[name]] == []


def test_number_and_size():
    assert 35 <= len(SESSIONS) <= 45
    sizes = [path.stat().st_size for path in FOLDER.glob("*.jsonl")]
    assert sum(sizes) <= 1_000_000
    assert max(sizes) <= 64_000


def test_headers_and_file_names():
    for name, (header, _) in SESSIONS.items():
        assert header["type"] == "session"
        assert header["cwd"].startswith("/home/dev/")
        stamp = header["timestamp"].replace(":", "-").replace(".", "-")
        assert name == f"{stamp}_{header['id']}.jsonl"


def test_versions():
    assert versions()[1] >= 3
    assert versions()[2] >= 3
    assert versions()[3] > len(SESSIONS) / 2


def test_parents_resolve():
    for header, entries in SESSIONS.values():
        seen = {None}
        for entry in entries:
            if header.get("version", 1) == 1:
                assert not entry.keys() & {"id", "parentId"}
                continue
            assert entry["parentId"] in seen
            assert entry["id"] not in seen
            seen.add(entry["id"])


def test_every_call_has_its_result():
    for _, entries in SESSIONS.values():
        messages = [e["message"] for e in entries if e["type"] == "message"]
        results = [m["toolCallId"] for m in messages if m["role"] == "toolResult"]
        answered, unanswered = [], []
        for message in messages:
            if message["role"] == "assistant":
                ids = [call["id"] for call in calls_of(message)]
                good = message["stopReason"] == "toolUse"
                assert good == bool(ids) or message["stopReason"] in ("aborted", "error")
                (answered if good else unanswered).extend(ids)
        assert sorted(answered) == sorted(results)
        assert not set(unanswered) & set(results)


def test_an_in_file_branch():
    branched = [
        name
        for name, (_, entries) in SESSIONS.items()
        if any(n > 1 for n in Counter(e["parentId"] for e in entries if "id" in e).values())
    ]
    assert branched
    assert any(entry["type"] == "branch_summary" for entry in ENTRIES)


def test_a_fork_pair_keeps_ids():
    forks = [(h["parentSession"], e) for h, e in SESSIONS.values() if "parentSession" in h]
    assert forks
    for parent, entries in forks:
        shared = SESSIONS[parent.rsplit("/", 1)[1]][1]
        length = sum(a == b for a, b in zip(shared, entries, strict=False))
        assert 2 < length < min(len(shared), len(entries))
        assert shared[:length] == entries[:length]


def test_compactions():
    by_version = {}
    for header, entries in SESSIONS.values():
        version = header.get("version", 1)
        for i, entry in enumerate(entries):
            if entry["type"] != "compaction":
                continue
            by_version[version] = entry
            if version == 1:
                kept = entries[entry["firstKeptEntryIndex"] - 1]  # the header is number 0
            else:
                kept = next(e for e in entries[:i] if e["id"] == entry["firstKeptEntryId"])
            assert kept["message"]["role"] == "user"
    assert {1, 3} <= set(by_version)


@pytest.mark.parametrize(
    "kind",
    ["model_change", "thinking_level_change", "label", "session_info", "custom_message"],
)
def test_entry_types(kind):
    assert any(entry["type"] == kind for entry in ENTRIES)
    if kind == "custom_message":
        assert any(m["role"] == "hookMessage" for m in MESSAGES)  # its form in version 2


def test_models_and_thinking_levels_change_within_a_session():
    for kind in ("model_change", "thinking_level_change"):
        assert any(sum(e["type"] == kind for e in es) > 1 for _, es in SESSIONS.values())


def test_turns_that_went_wrong():
    stops = Counter(m["stopReason"] for m in MESSAGES if m["role"] == "assistant")
    assert stops["aborted"] >= 1
    assert stops["error"] >= 1
    failed = [m["toolName"] for m in MESSAGES if m["role"] == "toolResult" and m["isError"]]
    assert {"bash", "edit"} <= set(failed)
    for _, entries in SESSIONS.values():
        last = [e["message"] for e in entries if e["type"] == "message"][-1]
        assert (last["role"], last["stopReason"]) == ("assistant", "stop")


def test_parts_of_messages():
    assert any(len(calls_of(m)) > 1 for m in MESSAGES if m["role"] == "assistant")
    assert all(block["thinking"] for block in blocks("thinking"))
    assert len(blocks("thinking")) >= 5
    lists = [m for m in MESSAGES if isinstance(m.get("content"), list)]
    roles = {m["role"] for m in lists if any(b["type"] == "image" for b in m["content"])}
    assert roles == {"user", "toolResult"}
    commands = [m for m in MESSAGES if m["role"] == "bashExecution"]
    assert {bool(m.get("excludeFromContext")) for m in commands} == {True, False}
    names = {block["name"] for block in blocks("toolCall")}
    assert names == {"bash", "read", "edit", "write", "grep", "find", "ls"}
    arguments = [b["arguments"] for b in blocks("toolCall") if b["name"] == "edit"]
    assert any("edits" in a for a in arguments)
    assert any("oldText" in a for a in arguments)


def test_kinds_of_tasks_and_projects():
    scripts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("scripts/*.txt"))]
    kinds = [kind for text in scripts for kind in re.findall(r"^kind (.+)$", text, re.MULTILINE)]
    assert len(kinds) == len(SESSIONS)
    assert len(set(kinds)) >= 12
    assert len({header["cwd"] for header, _ in SESSIONS.values()}) >= 8


def test_nothing_of_this_machine_is_in_them():
    for path in FOLDER.glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        assert "sample-sessions-" not in text
        assert not re.search(r"/(tmp|private|var|root|Users)/\w", text)
        assert sys.base_prefix not in text or sys.base_prefix == "/usr"


def test_several_sessions_have_several_user_turns():
    turns = [
        sum(e["type"] == "message" and e["message"]["role"] == "user" for e in entries)
        for _, entries in SESSIONS.values()
    ]
    assert sum(n >= 2 for n in turns) >= 10
    assert max(turns) >= 4
