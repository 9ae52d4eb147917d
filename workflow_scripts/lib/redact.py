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
NEWLINE = rb"(?:\\{1,8}[rn]|[\r\n])"
QUOTE = rb"""\\{0,15}["'`]"""
# What stands between a name and its value: `=`, `: `, `" : "`, `'] = '`, `: str = "`, `", "`, `>`.
BETWEEN = re.compile(
    rb"""(?P<after>(?:[_-][a-z0-9_-]{1,24})?[0-9]{0,2})
    (?: (?:QUOTE)?\]?\??BLANKS (?: :=|=>|[=!]==?|\?\?|\|\||[:=](?:\*\*)? ) BLANKS
        (?: (?<=[: ])[a-z]{2,10}(?:[ ]\|[ ][a-z]{2,10})? BLANKS = BLANKS
          | [|>]-?NEWLINE{1,2} BLANKS
          | [\[(] BLANKS (?=[bruf]?QUOTE) )?
      | (?:QUOTE)?(?:,|NEWLINE{1,2}) BLANKS (?:QUOTE)?value(?:QUOTE)? BLANKS [:=] BLANKS
      | (?P<comma>QUOTE BLANKS , BLANKS (?=QUOTE))
      | (?P<blank>[ ]{1,4})
      | > )
    (?: [bruf]?(?P<quote>QUOTE)(?:(?P=quote){2})?+ [ ]{0,2} )?
    (?: (?P<scheme>[a-z]{2,12}) [ ]{1,4} )?""".replace(b"QUOTE", QUOTE)
    .replace(b"BLANKS", BLANKS)
    .replace(b"NEWLINE", NEWLINE),
    re.VERBOSE,
)
QUOTED = {
    quote: re.compile(rb"""(?:[^\s"\\%b\x00-\x1f]|\\/|\\u[0-9a-fA-F]{4})*+""" % quote)
    for quote in (b'"', b"'", b"`")
}
BARE = re.compile(rb"""[^\s"'`\\,;()<>{}|&$\[\]\x00-\x1f]*+""")
OPENING = (b"(", b"[", b"{", b"$", b"<")  # of a call, an index, a template: no literal
CALLED = re.compile(rb"\(\\{0,15}[\"'`][a-z0-9_-]*$")
SCHEMES = (b"bearer", b"basic", b"token", b"bot", b"digest", b"apikey")
# `--api-key VALUE`, and how fish and Dockerfiles set a variable.
OPTION = re.compile(
    rb"(?:^|[^a-z0-9])(?:--?[a-z][a-z-]*|(?:set[ ]-[a-z]{1,4}|env|arg)[ ]{1,4}[a-z0-9_]*)$"
)
# Variables and expressions, patterns, paths and addresses, and what was replaced before.
NO_LITERAL = re.compile(
    rb"""\$[A-Za-z_(]|<[a-z]|%[sv(]|arn:|.*(?:A-Z|a-z|0-9|\{\{|\{[A-Za-z_][\w.]*\}|://|\[REDACTED:)
    |0x[0-9A-Fa-f]+$|sha(?:1|256|384|512)-
    |(?:~|\.{1,2})?/(?:[^/]*/)*?[a-z._-]{3,}(?:/|$)|[A-Za-z]:\\|[\w.-]+\(""",
    re.VERBOSE | re.DOTALL,
)
# An expression such as `settings.api.key2`: what stands first is a word.
EXPRESSION = re.compile(
    rb"(?P<first>[A-Za-z_]\w*)(?:\(\)|\[\w*\])?(?:(?:\?\.|\.|::|->)[A-Za-z_]\w*(?:\(\)|\[\w*\])?)+$"
)
URL_PASSWORD = re.compile(
    rb"""://(?P<user>[^\s:/@"'`\\<>{}$()\[\]]{0,64}+):(?!\$[({A-Za-z_])(?P<value>[^\s/@"'`\\<>{}\[\]]{3,256}+)@
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
# Lines of base64, bare or behind the marks of a diff, a quotation or a comment, or behind what
# `git blame` or `grep -n` put there; what opens the key ends a line, or its first line follows.
TORN_KEY = re.compile(
    rb"""[A-Za-z0-9+/=]{0,80}
    (?: NEWLINES{1,4} (?: (?:[-+ \t0-9>\#*|:]|\xe2\x86\x92|\\u2192){0,16}+ [A-Za-z0-9+/=]{32,}
      | [^\\\r\n]{0,100}? (?<![A-Za-z0-9+/=]) [A-Za-z0-9+/=]{40,} ) )*+""".replace(
        b"NEWLINES", NEWLINES
    ),
    re.VERBOSE,
)
KEY_MARK = re.compile(
    rb"-----(?:BEGIN|(?P<end>END))[ ](?:[A-Z0-9]{1,16}[ ]){0,4}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----"
)
LONGEST_KEY = 16_384  # bytes from BEGIN to END, whatever stands before each line
KEY_LINE = re.compile(rb"[A-Za-z0-9+/]{40,}")


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


def redact_text(text: str) -> str:
    """Replace each secret in a short text, such as a file's name or an error's message."""
    replaced, _ = redact(text.encode("utf-8", "surrogateescape"))
    return replaced.decode("utf-8", "surrogateescape")


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
        if not match["end"]:  # decorated line by line, or cut off
            mark = KEY_MARK.search(data, match.end(), match.end() + LONGEST_KEY)
            between = data[match.end() : mark.start()] if mark and mark["end"] else b""
            if any(map(random_bytes, KEY_LINE.findall(between))):
                yield match.start(), mark.end(), "private-key"
                continue
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
        # SYNC_TOKEN=... of an environment is a secret, a syncToken in a program is not.
        environment = data.startswith(b"=", match.end()) and data[start : match.end()].isupper()
        if rule.not_before and not environment and rule.not_before.search(preceding):
            continue
        if harmless_after.match(between["after"]):
            continue
        quote = between["quote"]
        at = between.end()
        if between["scheme"] not in SCHEMES and rule.kind != "authorization":
            at = between.start("scheme") if between["scheme"] else at
        value = (QUOTED[quote[-1:]] if quote else BARE).match(data, at)
        end = value.end()
        if end - value.start() > secret_rules.LONGEST:
            examined = end
        if quote:
            closed = data[end : end + 1] not in (b" ", b"$", b"{")
        else:
            closed = not data.startswith(OPENING, end) or data.startswith(b"</", end)
        expression = None if quote else EXPRESSION.match(value[0])
        if expression and not random_bytes(expression["first"]):
            continue
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
