"""Families and the split: what belongs together, and what the split depends on."""

import random

import pytest
from session_maker import assistant, call, header, linear, read, user

from workflow_scripts.lib import families, jsonl
from workflow_scripts.split_sessions import split_sessions


def session(name, second=0, turns=2, **extra):
    """A session whose texts and ids no other session has."""
    lines, parent = [header(name, second=second, **extra)], None
    for number in range(turns):
        lines.append(user(f"{name}u{number}", parent, f"{name} asks {number}"))
        parent = f"{name}a{number}"
        lines.append(assistant(parent, f"{name}u{number}", f"{name} answers {number}"))
    return lines


def groups(tmp_path, files, seed=0):
    conversations, _, _ = read(tmp_path, files)
    return sorted(sorted(family.sessions) for family in families.families_of(conversations, seed))


def test_sessions_that_share_nothing_are_families_of_their_own(tmp_path):
    assert groups(tmp_path, {"x/s.jsonl": session("a"), "y/s.jsonl": session("b", 1)}) == [
        ["a"],
        ["b"],
    ]


@pytest.mark.parametrize(
    "parent", ["a", "/home/x/2026-01-01T00-00-00-000Z_a.jsonl", r"C:\x\first.jsonl", "first"]
)
@pytest.mark.parametrize("key", ["parentSession", "branchedFrom"])
def test_a_header_link_joins(tmp_path, parent, key):
    files = {"first.jsonl": session("a"), "b.jsonl": session("b", 1, **{key: parent})}
    assert groups(tmp_path, files) == [["a", "b"]]


def test_forks_of_a_session_that_is_not_here_are_one_family(tmp_path):
    files = {
        "b.jsonl": session("b", parentSession="/x/2026_gone.jsonl"),
        "c.jsonl": session("c", parentSession="gone"),
    }
    assert groups(tmp_path, files) == [["b", "c"]]


def test_a_link_through_a_session_without_turns_of_its_own_holds(tmp_path):
    files = {
        "a.jsonl": session("a"),
        "b.jsonl": [header("b", parentSession="a"), user("u", None)],
        "c.jsonl": session("c", 2, parentSession="b"),
    }
    assert groups(tmp_path, files) == [["a", "c"]]


def test_entries_that_no_conversation_shows_join_too(tmp_path):
    first = session("a")
    lost = [user("x", "gone", "Something else"), assistant("y", "x", "Another answer")]
    files = {"a.jsonl": first, "b.jsonl": [header("b", second=1), *first[1:3], *lost]}
    conversations, _, _ = read(tmp_path, files)
    assert [turn["text"] for turn in conversations[1]["turns"]] == [
        "Something else",
        "Another answer",
    ]
    assert groups(tmp_path, files) == [["a", "b"]]


def test_shared_entries_join_without_a_link(tmp_path):
    shared = [user("u", None, "q"), assistant("a", "u", "A")]
    files = {
        "a.jsonl": [header("a"), user("0", None), *shared[:1], assistant("x", "u", "X")],
        "b.jsonl": [header("b", second=1), *shared, user("v", "a"), assistant("y", "v", "Y")],
    }
    assert groups(tmp_path, files) == [["a", "b"]]


def test_shared_messages_of_files_without_ids_join(tmp_path):
    first, second = session("a")[1:], session("b")[1:]
    files = {
        "a.jsonl": [header("a", None), *linear(*first)],
        "b.jsonl": [header("b", None), *linear(*second[:2], *first[2:], *second[2:])],
    }
    assert groups(tmp_path, files) == [["a", "b"]]


def test_the_same_opening_joins_and_short_equal_answers_do_not(tmp_path):
    def lines(name, ask, answer, second):
        return [
            header(name, second=second),
            user(f"{name}u", None, ask) | {"timestamp": name},
            assistant(f"{name}a", f"{name}u", answer) | {"timestamp": name},
        ]

    files = {
        "a.jsonl": lines("a", "hello", "Hi!", 0),
        "b.jsonl": lines("b", "hello", "Hi!", 1),
        "c.jsonl": lines("c", "good day", "Hi!", 2),
    }
    assert groups(tmp_path, files) == [["a", "b"], ["c"]]


def test_the_same_long_answer_joins(tmp_path):
    def lines(name):
        made = call("c", "write", {"content": "x" * 300})
        turn = assistant(f"{name}z", f"{name}a1", "", [made], "toolUse")
        return [*session(name), turn | {"timestamp": name}]

    assert groups(tmp_path, {"a.jsonl": lines("a"), "b.jsonl": lines("b")}) == [["a", "b"]]


def many(count=20):
    return {f"{n}.jsonl": session(f"s{n}", n, turns=1 + n % 3) for n in range(count)}


def test_split_is_about_the_wished_size_and_stays_when_files_are_shuffled(tmp_path):
    files = many()
    conversations, _, _ = read(tmp_path, files)
    chosen = families.validation_sessions(families.families_of(conversations, 0), 3)
    turns = sum(len(c["turns"]) // 2 for c in conversations if c["session"] in chosen)
    assert abs(turns - 3) <= 1
    random.Random(1).shuffle(conversations)
    assert families.validation_sessions(families.families_of(conversations, 0), 3) == chosen
    assert families.validation_sessions(families.families_of(conversations, 1), 3) != chosen


def test_order_of_a_family_does_not_depend_on_the_others(tmp_path):
    conversations, _, _ = read(tmp_path, many())
    orders = {f.sessions: f.order for f in families.families_of(conversations, 5)}
    fewer = {f.sessions: f.order for f in families.families_of(conversations[::2], 5)}
    assert fewer.items() <= orders.items()


@pytest.mark.parametrize("val_rows", [1, 5, 10_000])
def test_neither_side_is_empty_with_two_families(tmp_path, val_rows):
    files = {"a.jsonl": session("a", turns=9), "b.jsonl": session("b", 1, turns=1)}
    conversations, _, _ = read(tmp_path, files)
    assert len(families.validation_sessions(families.families_of(conversations, 0), val_rows)) == 1


@pytest.mark.parametrize(("val_rows", "expected"), [(1, 1), (7, 7), (20, 20), (256, 20)])
def test_validation_has_the_wished_turns_or_a_tenth_of_all(val_rows, expected):
    found = [families.Family(frozenset([f"s{n}"]), 1, f"{n:03}") for n in range(200)]
    assert len(families.validation_sessions(found, val_rows)) == expected


def test_one_family_is_an_error_that_says_what_to_do(tmp_path):
    conversations, _, _ = read(tmp_path, {"a.jsonl": session("a")})
    with pytest.raises(ValueError, match=r"one family.*add sessions"):
        families.validation_sessions(families.families_of(conversations, 0), 256)


def test_script_puts_every_conversation_on_one_side(tmp_path):
    conversations, _, _ = read(tmp_path, many())
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    split_sessions(tmp_path / "conversations.jsonl", train, val, val_rows=3, seed=3)
    sides = [list(jsonl.read_jsonl(path)) for path in (train, val)]
    assert all(sides)
    names = [{record["conversation"] for record in side} for side in sides]
    assert names[0] | names[1] == {record["conversation"] for record in conversations}
    texts = [{t["text"] for record in side for t in record["turns"]} for side in sides]
    assert not texts[0] & texts[1]
