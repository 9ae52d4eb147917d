"""The rules of secret_rules.toml as compiled patterns, and the judgement of what looks random.

Each literal is searched for by its rarest byte, which `re` finds with memchr: one pass over a
session costs about half a millisecond per MB, an alternation of all the literals twenty.
"""

import functools
import math
import re
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

RAREST_FIRST = b"_JGIKz-vkwypbqjxhc"  # in session files; few bytes that serve many literals
# Before a key: no letter, unless it ends a JSON escape, a URL's escape or a terminal's colour.
STARTS = (
    rb"(?:(?<![A-Za-z0-9_+\\-]HEAD)|(?<=\\[nrtbf]HEAD)|(?<=\\u00..HEAD)|(?<=%[0-9A-F]{2}HEAD)"
    rb"|(?<=\[0mHEAD)|(?<=[\[;][0-9]{2}mHEAD))"
)
NAME_ENDS = rb"(?=[_0-9\\\"'`\]?:=!>,\t -])"  # a quick look, before all that may follow is tried
UNICODE_ESCAPE = re.compile(rb"\\u[0-9a-fA-F]{4}")
SHORTEST, LONGEST = 12, 4096  # bytes of a value that is judged by its name
LEAST_RANDOM = 8  # of them in parts that are no words
LEAST_ENTROPY_BITS = 2.8  # per byte; 12 random hexadecimal digits have about 3.1
CLASSES = (rb"[a-z]", rb"[A-Z]", rb"[0-9]")
WORDLIKE_PAIRS, WORDLIKE_LETTERS = 0.6, 0.7


class Rule(NamedTuple):
    """A key's prefix or a name whose value is a secret; `random`: bytes that must look random."""

    kind: str
    literal: bytes
    random: int = 0
    before: re.Pattern[bytes] | None = None
    not_before: re.Pattern[bytes] | None = None
    spaced: bool = False


class Search(NamedTuple):
    """One pass over the data; the match's `lastindex` - 1 is the index of the rule."""

    pattern: re.Pattern[bytes]
    rules: list[Rule]
    pivots: list[int]  # the match begins so many bytes into the rule's literal


class Rules(NamedTuple):
    """`names` are searched for in lower-cased data."""

    tokens: list[Search]
    names: list[Search]
    lists: dict[str, re.Pattern[bytes]]
    pairs: frozenset[bytes]


@functools.cache
def load() -> Rules:
    """Read and compile the rules, once."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    tokens = [
        (Rule(rule["kind"], prefix.encode(), rule.get("random", 0)), rule["body"].encode())
        for rule in data["tokens"]
        for prefix in rule["prefixes"]
    ]
    names = [
        (
            Rule(
                rule["kind"],
                word.encode(),
                before=_compiled(rule.get("before")),
                not_before=_compiled(rule.get("not_before")),
                spaced=rule.get("spaced", False),
            ),
            NAME_ENDS,
        )
        for rule in data["names"]
        for word in rule["words"]
    ]
    pairs = frozenset(data["lists"].pop("bigrams").encode().split())
    lists = {name: _compiled(text) for name, text in data["lists"].items()}
    return Rules(_searches(tokens, STARTS), _searches(names, b""), lists, pairs)


def _compiled(text: str | None) -> re.Pattern[bytes] | None:
    return text and re.compile("".join(text.split()).encode(), re.IGNORECASE)


def _searches(rules: list[tuple[Rule, bytes]], starts: bytes) -> list[Search]:
    groups = defaultdict(list)
    for rule, body in sorted(rules, key=lambda pair: -len(pair[0].literal)):
        pivot = min(rule.literal, key=lambda byte: RAREST_FIRST.find(byte) % 256)
        groups[pivot].append((rule, rule.literal.index(pivot), body))
    searches = []
    for members in groups.values():
        rests = [rule.literal[at:] for rule, at, _ in members]
        shared = rests[0]
        while not all(rest.startswith(shared) for rest in rests):
            shared = shared[:-1]
        preceding = {rule.literal[at - 1] if at else None for rule, at, _ in members}
        pattern = re.escape(shared)
        if None not in preceding:  # a cheap look before the branches are tried
            pattern += rb"(?<=[%b]%b)" % (re.escape(bytes(sorted(preceding))), pattern)
        branches = []
        for rule, at, body in members:
            head = re.escape(rule.literal[: at + len(shared)])
            rest = re.escape(rule.literal[at + len(shared) :])
            start = starts.replace(b"HEAD", head)
            branches.append(rb"(?<=%b)%b%b%b()" % (head, start, rest, body))
        searches.append(
            Search(
                re.compile(pattern + rb"(?:%b)" % b"|".join(branches)),
                [rule for rule, _, _ in members],
                [at for _, at, _ in members],
            )
        )
    return searches


def random_bytes(value: bytes) -> int:
    """Count the bytes of `value` in parts that are neither words nor numbers.

    Parts are what signs separate. A part is a word when most of its letters stand in runs whose
    neighbours are frequent pairs in source code, in ordinary case (`apiKey2`, `base64url`).
    """
    return sum(len(part) for part in re.findall(rb"[A-Za-z0-9]{4,}", value) if not _is_word(part))


def _is_word(part: bytes) -> bool:
    if part.isdigit():
        return True
    pairs = load().pairs
    letters = wordlike = 0
    for run in re.findall(rb"[^0-9]+", part):
        letters += len(run)
        lower = run.lower()
        frequent = sum(lower[at : at + 2] in pairs for at in range(len(run) - 1))
        humps = len(re.findall(rb"[a-z][A-Z]", run))
        if len(run) >= 3 and frequent >= WORDLIKE_PAIRS * (len(run) - 1) and humps <= len(run) / 4:
            wordlike += len(run)
    return wordlike >= WORDLIKE_LETTERS * letters


def entropy_bits(value: bytes) -> float:
    """Shannon entropy per byte of the value's own distribution."""
    size = len(value)
    return -sum(count / size * math.log2(count / size) for count in Counter(value).values())


def is_secret_value(value: bytes, kind: str) -> bool:
    """Whether a literal that was given to a secret's name is one, and no placeholder or word."""
    if not SHORTEST <= len(value) <= LONGEST or entropy_bits(value) < LEAST_ENTROPY_BITS:
        return False
    own = load().lists["placeholders"].sub(b" ", UNICODE_ESCAPE.sub(b" ", value))
    if random_bytes(own) >= LEAST_RANDOM:
        return True
    if len(own.split()) > 1 or not all(re.search(one, own) for one in CLASSES):
        return False
    signs = len(re.findall(rb"[!@#%^*~&$]", own))  # people build passwords out of words
    return signs >= (1 if kind == "password" else 2)
