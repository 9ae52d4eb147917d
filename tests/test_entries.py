"""Lines and files: what is read, what is refused, and that every line is counted."""

import json
import time

import fuzz_reader
import pytest
from session_maker import (
    assistant,
    call,
    compaction,
    header,
    linear,
    read,
    reasons,
    result,
    shape,
    to_bytes,
    user,
)

from workflow_scripts.lib import corpus, entries

GOOD = [header(), user("u", None), assistant("a", "u", "r")]


def test_plain_file_counts_each_line(tmp_path):
    conversations, rejected, stats = read(tmp_path, {"f.jsonl": GOOD})
    assert shape(conversations[0]) == ["u q", "a* r"]
    assert conversations[0]["conversation"] == "s/a/0"
    assert rejected == []
    assert (stats["lines_read"], stats["lines_used"], stats["lines_outside"]) == (3, 2, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.rstrip(b"\n"),
        lambda data: data.replace(b"\n", b"\n\n \t\n"),
    ],
    ids=["bom", "crlf", "no final newline", "blank lines"],
)
def test_harmless_bytes(tmp_path, change):
    conversations, rejected, _ = read(tmp_path, {"f.jsonl": change(to_bytes(GOOD))})
    assert shape(conversations[0]) == ["u q", "a* r"]
    assert rejected == []


def test_only_newline_bytes_end_lines(tmp_path):
    text = "a\u2028b\u2029c\u0085d\x0be"
    lines = [json.dumps(line, ensure_ascii=False).encode() for line in GOOD]
    lines[1] = json.dumps(user("u", None, text), ensure_ascii=False).encode()
    conversations, _, stats = read(tmp_path, {"f.jsonl": lines})
    assert conversations[0]["turns"][0]["text"] == text
    assert stats["lines_read"] == 3


def test_glued_and_torn_lines_are_refused(tmp_path):
    glued = to_bytes([user("u", None)]).strip() + to_bytes([user("v", "u")]).strip()
    data = to_bytes([header(), glued]) + to_bytes([assistant("w", "v", "text")])[:-20]
    conversations, rejected, stats = read(tmp_path, {"f.jsonl": data})
    assert conversations == []
    assert [(r["line"], r["reason"]) for r in rejected] == [
        (2, "glued-objects"),
        (3, "torn-last-line"),
        (1, "no-conversation"),
    ]
    assert stats["lines_rejected"] == 2


def test_salvage_splits_glued_entries_that_carry_ids(tmp_path):
    glued = to_bytes([user("u", None)]).strip() + to_bytes([user("v", "u", "b")]).strip()
    file = [
        header(),
        glued,
        b"\x00" * 9,
        b"\x00\x00" + to_bytes([assistant("w", "v", "r")]).strip(),
    ]
    conversations, rejected, stats = read(tmp_path, {"f.jsonl": file}, salvage=True)
    assert shape(conversations[0]) == ["u q", "u b", "a* r"]
    assert reasons(rejected) == ["nul-padding"]
    assert stats["lines_used"] == 2


def test_salvage_leaves_lines_without_ids_alone(tmp_path):
    one, two = (to_bytes(linear(user(name, None))).strip() for name in "uv")
    file = [header(version=None), one + two, *linear(assistant("a", None, "r"))]
    _, rejected, _ = read(tmp_path, {"f.jsonl": file}, salvage=True)
    assert reasons(rejected) == ["glued-objects"]


def test_nul_bytes_are_refused_without_salvage(tmp_path):
    file = [*GOOD, b"\x00" * 50, b"\x00\x00" + to_bytes([user("v", "a")]).strip()]
    conversations, rejected, _ = read(tmp_path, {"f.jsonl": file})
    assert reasons(rejected) == ["nul-padding", "nul-padding"]
    assert shape(conversations[0]) == ["u q", "a* r"]


def test_invalid_utf8_is_context_but_not_trained_on(tmp_path):
    lines = to_bytes([*GOOD, user("v", "a", "X"), assistant("b", "v", "Y"), user("w", "b")])
    data = lines.replace(b'"X"', b'"\xff"').replace(b'"Y"', b'"\xc3"')
    conversations, rejected, stats = read(tmp_path, {"f.jsonl": data})
    assert shape(conversations[0]) == ["u q", "a* r", "u \ufffd", "a \ufffd", "u q"]
    assert [(r["line"], r["lines"]) for r in rejected] == [(4, 0), (5, 0)]
    assert stats["unsupervised"] == {"invalid-utf8": 1}


def test_lone_surrogates_become_replacement_characters(tmp_path):
    file = [
        header(),
        user("u", None, "pair \ud83d\ude00 lone \ud83d"),
        assistant("a", "u", "x\udc00", [call("c", arguments={"k\ud800": "\ud83d"})], "toolUse"),
        result("r", "a", "c", "\ude00"),
        assistant("b", "r", "", [call("d", arguments='{"k": "\\ud83d"}')], "toolUse"),
    ]
    file[4]["message"]["content"][0]["arguments"] = '{"k": "\\ud83d"}'
    conversations, _, _ = read(tmp_path, {"f.jsonl": file})
    turns = conversations[0]["turns"]
    assert turns[0]["text"] == "pair \U0001f600 lone \ufffd"
    assert turns[1]["text"] == "x\ufffd"
    assert turns[1]["calls"][0]["arguments"] == {"k\ufffd": "\ufffd"}
    assert turns[2]["text"] == "\ufffd"
    assert turns[3]["calls"][0]["arguments"] == {"k": "\ufffd"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "broken-json"),
        (b"nonsense", "broken-json"),
        (b'{"a": NaN}', "broken-json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "broken-json"),
        (b"[" * 100_000, "nested-too-deep"),
        (b"[1, 2]", "not-an-object"),
        (b"null", "not-an-object"),
        (b'"text"', "not-an-object"),
    ],
)
def test_lines_that_are_no_entries(tmp_path, line, reason):
    conversations, rejected, _ = read(tmp_path, {"f.jsonl": [*GOOD, line, user("v", "a")]})
    assert reasons(rejected) == [reason]
    assert rejected[0]["line"] == 4
    assert shape(conversations[0]) == ["u q", "a* r", "u q"]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ({"v": 4, "kind": "header", "id": "z", "storageVersion": 1}, "unsupported-version"),
        (header(version=4), "unsupported-version"),
        (header(version="next"), "unsupported-version"),
        (header(version=True), "unsupported-version"),
        (header() | {"id": None}, "header-without-id"),
        (header() | {"id": 7}, "header-without-id"),
        (user("u", None), "missing-header"),
        ({"file": "a.jsonl", "sha256": "0" * 64}, "manifest"),
        ({"type": "user", "sessionId": "x", "parentUuid": None}, "claude-session"),
        ({"type": "session_meta", "payload": {}}, "codex-session"),
        ({"some": "thing"}, "not-a-session"),
        ({"type": ["session"]}, "not-a-session"),
        ([1], "not-a-session"),
    ],
)
def test_foreign_files_are_refused_by_name_and_the_run_goes_on(tmp_path, first, reason):
    foreign = [first, [{"kind": "value", "op": "set"}], user("u", None), b""]
    files = {"foreign.jsonl": foreign, "good.jsonl": GOOD}
    conversations, rejected, stats = read(tmp_path, files)
    assert [(r["file"], r["line"], r["reason"], r["lines"]) for r in rejected] == [
        ("foreign.jsonl", None, reason, 4)
    ]
    assert len(conversations) == 1
    assert stats["lines_read"] == 7


@pytest.mark.parametrize(
    ("data", "reason", "lines"),
    [
        (b"", "empty-file", 0),
        (b"\n\n", "empty-file", 2),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not-json", 3),
        ("\n".join(map(str, GOOD)).encode("utf-16"), "not-json", 3),
    ],
)
def test_files_without_any_object(tmp_path, data, reason, lines):
    _, rejected, _ = read(tmp_path, {"f.jsonl": data})
    assert [(r["reason"], r["line"], r["lines"]) for r in rejected] == [(reason, None, lines)]


def test_malformed_lines_before_the_header_are_skipped(tmp_path):
    conversations, rejected, _ = read(tmp_path, {"f.jsonl": [b"{oops", *GOOD]})
    assert reasons(rejected) == ["broken-json"]
    assert len(conversations) == 1


def test_several_headers_are_several_sessions(tmp_path):
    file = [
        header("s1"),
        user("1", None, "x"),
        assistant("2", "1", "X"),
        header("s2", second=1),
        user("1", None, "y"),
        assistant("2", "1", "Y"),
        header("s3", version=9),
        user("1", None, "z"),
        assistant("2", "1", "Z"),
    ]
    conversations, rejected, stats = read(tmp_path, {"f.jsonl": file})
    assert [(c["session"], shape(c)) for c in conversations] == [
        ("s1", ["u x", "a* X"]),
        ("s2", ["u y", "a* Y"]),
    ]
    assert [(r["line"], r["reason"], r["lines"]) for r in rejected] == [
        (7, "unsupported-version", 3)
    ]
    assert stats["sessions"] == 2


def test_v1_index_counts_parsed_lines_from_the_sessions_own_header(tmp_path):
    turns = linear(user("a", None, "one"), assistant("b", None, "A"), user("c", None, "two"))
    rest = [
        *linear(compaction("k", None, "S", firstKeptEntryIndex=3), assistant("d", None, "B")),
    ]
    file = [header("x", None), *GOOD[1:], header("y", None), turns[0], b"{torn", *turns[1:], *rest]
    file[1:3] = linear(*GOOD[1:])
    conversations, _, _ = read(tmp_path, {"f.jsonl": file})
    assert shape(conversations[2])[1:] == ["u two", "a* B"]


def test_a_file_that_vanished_is_listed(tmp_path):
    read(tmp_path, {"a.jsonl": GOOD, "b.jsonl": GOOD})
    (tmp_path / "raw/b.jsonl").unlink()
    rejected = []
    counts = corpus.Counts()
    names = ["b.jsonl", "a.jsonl"]
    records = corpus.read(tmp_path / "raw", names, "active", False, counts, rejected.append)
    assert len(list(records)) == 1
    assert [(r["file"], r["reason"], r["lines"]) for r in rejected] == [
        ("b.jsonl", "unreadable", 0)
    ]


def test_odd_file_names(tmp_path):
    name = 'a b/ü "x" \u202e#%41.jsonl'
    conversations, _, _ = read(tmp_path, {name: GOOD})
    assert conversations[0]["file"] == name


def test_huge_lines_take_linear_time(tmp_path):
    def seconds(size):
        path = tmp_path / "huge.jsonl"
        noise = b'{"type":"message","id":"x' + b"\\n{" * size + b"\n"
        glued = to_bytes([user("g", None)]).strip() * (size // 50)
        path.write_bytes(to_bytes([header(), user("u", None, "x" * 3 * size), glued]) + noise)
        started = time.perf_counter()
        reading = entries.read_file(path, "f", salvage=True)
        assert len(reading.sessions[0].items) >= 2
        return time.perf_counter() - started

    small, large = seconds(500_000), seconds(4_000_000)
    assert large < 30 * small + 0.5


def test_fuzz_never_raises_and_loses_no_line(tmp_path):
    """A small part of what `python tests/fuzz_reader.py` does; each case by its own number."""
    for number in range(600):
        data, chance = fuzz_reader.case(20260101, number, fuzz_reader.BASES)
        fuzz_reader.check(tmp_path, data, chance)
