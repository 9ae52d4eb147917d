"""Secrets in the bytes of session files, replaced by their kind before anything is written.

The rules are data of our own (secret_rules.toml), in part after the plugins of detect-secrets.
Depending on that library would bring `requests` and one `re` search per rule and line, without
the newer providers' keys; its patterns as data, with their source named, run in few fast passes.
"""

import base64
import binascii
import re
from collections import Counter

from workflow_scripts.lib import secret_rules
from workflow_scripts.lib.secret_rules import is_secret_value, load, random_bytes

BLANKS = rb"(?:[ \t]|\\{1,8}t){0,8}"
QUOTE = rb"""\\{0,15}["'`]"""
# What stands between a name and its value: `=`, `: `, `" : "`, `'] = '`, `: str = "`, `", "`, `>`.
BETWEEN = re.compile(
    rb"""(?P<after>(?:[_-][a-z0-9_-]{1,24})?[0-9]{0,2})
    (?: (?:QUOTE)?\]?\??BLANKS (?: :=|=>|[=!]==?|[:=] ) BLANKS
        (?: (?<=[: ])[a-z]{2,10}(?:[ ]\|[ ][a-z]{2,10})? BLANKS = BLANKS )?
      | (?P<comma>QUOTE BLANKS , BLANKS (?=QUOTE))
      | (?P<blank>[ ]{1,4})
      | > )
    (?: [bru]?(?P<quote>QUOTE) )?
    (?: (?P<scheme>bearer|basic|token|bot|digest|apikey) [ ]{1,4} )?""".replace(
        b"QUOTE", QUOTE
    ).replace(b"BLANKS", BLANKS),
    re.VERBOSE,
)
QUOTED = {
    quote: re.compile(rb"""(?:[^\s"\\%b\x00-\x1f]|\\/|\\u[0-9a-fA-F]{4})*+""" % quote)
    for quote in (b'"', b"'", b"`")
}
BARE = re.compile(rb"""[^\s"'`\\,;()<>{}|&$\[\]\x00-\x1f]*+""")
OPENING = (b"(", b"[", b"{", b"$", b"<")  # of a call, an index, a template: no literal
CALLED = re.compile(rb"\(\\{0,15}[\"'`][a-z0-9_-]*$")
OPTION = re.compile(rb"(?:^|[^a-z0-9])--?[a-z][a-z-]*$")
# Variables and expressions, patterns, paths and addresses, and what was replaced before.
NO_LITERAL = re.compile(
    rb"""\$[A-Za-z_(]|<[a-z]|%[sv(]|arn:|.*(?:A-Z|a-z|0-9|\{\{|\{[A-Za-z_][\w.]*\}|://|\[REDACTED:)
    |(?:[A-Za-z_][A-Za-z0-9_]*(?:\(\)|\[\w*\])?(?:\?\.|\.|::|->))+[A-Za-z_][A-Za-z0-9_]*$
    |(?:~|\.{1,2})?/(?:[^/]*/)*?[a-z._-]{3,}(?:/|$)|[A-Za-z]:\\|[\w.-]+\(""",
    re.VERBOSE | re.DOTALL,
)
URL_PASSWORD = re.compile(
    rb"""://(?P<user>[^\s:/@"'`\\<>{}$()\[\]]{0,64}+):(?P<value>[^\s/@"'`\\<>{}$\[\]]{3,256}+)@
    (?=[A-Za-z0-9\[])""",
    re.VERBOSE,
)
NEWLINES = rb"(?:\\{1,8}[rnt]|\s)"
PRIVATE_KEY = re.compile(
    rb"""-----BEGIN[ ](?:[A-Z0-9]{1,16}[ ]){0,4}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----
    (?P<body> (?: [A-Za-z0-9+/=:,]|-(?!----)|NEWLINES|\\(?:\\\\){0,3}["/]|['`] )*+ )
    (?P<end>-----END[ ](?:[A-Z0-9]{1,16}[ ]){0,4}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----)?""".replace(
        b"NEWLINES", NEWLINES
    ),
    re.VERBOSE,
)
TORN_KEY = re.compile(rb"(?:NEWLINES|[A-Za-z0-9+/=]{32,})*+".replace(b"NEWLINES", NEWLINES))


def redact(data: bytes) -> tuple[bytes, Counter[str]]:
    """Replace each secret in `data` by `[REDACTED:<kind>]`; return the rest as it was, and counts.

    data: one line or any number of whole lines of JSONL, of any size, valid or not; blocks of a
    megabyte or more go fastest. Quotes, line ends and escapes outside the values stay, so JSON
    stays valid and lines keep their numbers. Time is linear in the size; nothing is raised.
    """
    found = find(data)
    if not found:
        return data, Counter()
    parts, at = [], 0
    for start, end, kind in found:
        parts += [
            data[at:start],
            b"[REDACTED:%b]" % kind.encode(),
            b"\n" * data.count(b"\n", start, end),
        ]
        at = end
    return b"".join([*parts, data[at:]]), Counter(kind for _, _, kind in found)


def find(data: bytes) -> list[tuple[int, int, str]]:
    """Return where secrets are: (start, end, kind), in order, none touching another's bytes."""
    rules = load()
    lowered = data.lower()
    spans = list(_private_keys(data))
    for search in rules.tokens:
        spans += _tokens(data, search)
    spans += _url_passwords(data)
    for search in rules.names:
        spans += _assigned(data, lowered, search)
    return _apart(spans)


def _apart(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Unite spans that overlap, under the kind of the one found first: the more precise rule."""
    rank = {span: at for at, span in reversed(list(enumerate(spans)))}
    united: list[tuple[int, int, str, int]] = []
    for start, end, kind in sorted(rank):
        place = rank[start, end, kind]
        if united and start < united[-1][1]:
            first, last, other, best = united[-1]
            united[-1] = (first, max(end, last), *min((best, other), (place, kind))[::-1])
        else:
            united.append((start, end, kind, place))
    return [span[:3] for span in united]


def _private_keys(data: bytes):
    if b"PRIVATE KEY" not in data:
        return
    for match in PRIVATE_KEY.finditer(data):
        body, end = match["body"], match.end()
        if not match["end"]:  # cut off: the lines that are nothing but base64
            torn = TORN_KEY.match(data, match.start("body"))
            body, end = torn[0], torn.end()
        body = re.sub(NEWLINES, b"", body)
        if _is_varied(body) and random_bytes(body) >= secret_rules.LEAST_RANDOM:
            yield match.start(), end, "private-key"


def _tokens(data: bytes, search: secret_rules.Search):
    for match in search.pattern.finditer(data):
        rule = search.rules[match.lastindex - 1]
        start = match.start() - search.pivots[match.lastindex - 1]
        body = data[start + len(rule.literal) : match.end()]
        if _is_varied(body) and (not rule.random or random_bytes(body) >= rule.random):
            yield start, match.end(), rule.kind


def _is_varied(body: bytes) -> bool:
    return len(set(body)) >= 6  # fewer is xxxxxxxx


def _url_passwords(data: bytes):
    placeholder = load().lists["url_placeholders"]
    for match in URL_PASSWORD.finditer(data):
        value = match["value"]
        port = value.isdigit() and len(value) <= 5
        if not port and value != match["user"] and not placeholder.fullmatch(value):
            yield *match.span("value"), "url-password"


def _assigned(data: bytes, lowered: bytes, search: secret_rules.Search):
    harmless_after = load().lists["harmless_after"]
    examined = 0
    for match in search.pattern.finditer(lowered):
        if match.end() < examined:
            continue
        between = BETWEEN.match(lowered, match.end())
        if not between:
            continue
        rule = search.rules[match.lastindex - 1]
        start = match.start() - search.pivots[match.lastindex - 1]
        preceding = lowered[max(0, start - 32) : start]
        if between["blank"] and not rule.spaced and not OPTION.search(preceding + rule.literal):
            continue
        if between["comma"] and not CALLED.search(preceding):
            continue  # in a list of names; get("API_KEY", "...") is a default
        if rule.before and not rule.before.search(preceding):
            continue
        if rule.not_before and rule.not_before.search(preceding):
            continue
        if harmless_after.match(between["after"]):
            continue
        quote = between["quote"]
        value = (QUOTED[quote[-1:]] if quote else BARE).match(data, between.end())
        end = value.end()
        if end - value.start() > secret_rules.LONGEST:
            examined = end
        if quote:
            closed = data.startswith(quote, end)
        else:
            closed = not data.startswith(OPENING, end) or data.startswith(b"</", end)
        if not closed or end - value.start() < secret_rules.SHORTEST or NO_LITERAL.match(value[0]):
            continue
        examined = end
        if is_secret_value(value[0], rule.kind) or (
            between["scheme"] == b"basic" and _is_basic(value[0])
        ):
            yield value.start(), end, rule.kind


def _is_basic(value: bytes) -> bool:
    """Whether it is the base64 of `user:password`, as in an Authorization header."""
    try:
        user, colon, password = base64.b64decode(value, validate=True).partition(b":")
    except binascii.Error:
        return False
    return bool(user and colon and password) and (user + password).isascii()
