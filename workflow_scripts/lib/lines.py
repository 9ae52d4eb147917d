"""One line of a session file -> its JSON value, with what was wrong or mended named.

As strict as JavaScript's JSON.parse (no NaN, no second value), for that is what pi reads with.
"""

import json
import re

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def shown(value: object) -> str:
    """A value of a file as messages show it: short, and never failing on odd ones."""
    if isinstance(value, str):
        return repr(value[:80])
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:80]
    return "an array" if isinstance(value, list) else "an object"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def bare(raw: bytes, number: int) -> bytes:
    """Take off the line end, blanks, and on line 1 the byte order mark."""
    if number == 1:
        raw = raw.removeprefix(BYTE_ORDER_MARK)
    return raw.strip(b" \t\r\n")


def parse(
    line: bytes, ended: bool, salvage: bool = False
) -> tuple[list, bool, tuple[str, str] | None]:
    """Return the JSON values of a line, whether invalid UTF-8 was replaced, and what is wrong.

    One value, none where something is wrong (reason, detail), several only with `salvage`.
    `ended`: whether a line end follows.
    """
    if salvage:
        line = line.strip(b"\x00 \t\r")
    try:
        text, damaged = line.decode("utf-8"), False
    except UnicodeDecodeError:
        text, damaged = line.decode("utf-8", errors="replace"), True
    try:
        values = [_value_of(text)]
    except json.JSONDecodeError as error:
        values = _split(text) if salvage else None
        if values is None:
            return [], damaged, _what_is_broken(text, error, ended)
    except RecursionError:
        return [], damaged, ("nested-too-deep", "the JSON is nested deeper than can be read")
    except ValueError as error:
        return [], damaged, ("broken-json", str(error)[:200])
    if b"\\ud" in line or b"\\uD" in line:  # escapes; raw surrogates are no valid UTF-8
        try:
            values = without_surrogates(values)
        except RecursionError:
            return [], damaged, ("nested-too-deep", "the JSON is nested deeper than can be read")
    return values, damaged, None


def _value_of(text: str) -> object:
    try:
        value, end = _DECODER.scan_once(text, 0)
        if end == len(text):
            return value
    except StopIteration:
        pass
    return _DECODER.decode(text)  # raises with what is wrong and where


def _what_is_broken(text: str, error: json.JSONDecodeError, ended: bool) -> tuple[str, str]:
    if not text or text.startswith("\x00") or text.endswith("\x00"):
        return "nul-padding", "NUL bytes around the line, as a crashed machine leaves them"
    if error.msg == "Extra data" and text[error.pos] in "{[":
        return "glued-objects", f"a second JSON value begins at character {error.pos + 1}"
    if not ended:
        return "torn-last-line", f"the file ends within this line ({error.msg})"
    return (
        "broken-json",
        f"{error.msg.removesuffix(' starting at')} at character {error.pos + 1} of {len(text)}",
    )


def _split(text: str) -> list[dict] | None:
    """Split glued entries; None unless all have ids, so that no index of a v1 file moves."""
    values, start = [], 0
    try:
        while start < len(text):
            value, start = _DECODER.raw_decode(text, start)
            if not isinstance(value, dict) or not isinstance(value.get("id"), str):
                return None
            if value.get("type") == "session" or "parentId" not in value:
                return None
            values.append(value)
            while start < len(text) and text[start] in " \t\r\x00":
                start += 1
    except (ValueError, RecursionError):
        return None
    return values or None


def without_surrogates(value: object) -> object:
    """Replace lone surrogates (legal in JSON, not in UTF-8) by U+FFFD, in keys and values."""
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value
