"""The config against its schema: unknown keys, wrong values, defaults; each refusal is one line."""

import difflib
import math
from collections.abc import Iterable
from contextlib import suppress

import jsonschema


class ConfigError(ValueError):
    """What is wrong in the config, as one line: the key, what was found, what is allowed."""


def check(config: dict, schema: dict) -> dict:
    """Return the config with its keys in order and the schema's defaults filled in.

    Raises ConfigError naming the first key that the schema does not allow, or its wrong value.
    """
    config = _with_typed_text(schema, schema, in_key_order(config))
    _refuse_unknown_keys(schema, schema, config, "")
    _refuse_wrong_values(schema, config)
    return with_defaults(schema, schema, config)


def in_key_order(value: object) -> object:
    """Mappings in the order of their keys, so that moving a line in the YAML reruns nothing."""
    if isinstance(value, dict):
        return {str(key): in_key_order(value[key]) for key in sorted(value, key=str)}
    return [in_key_order(item) for item in value] if isinstance(value, list) else value


def _resolve(root: dict, schema: dict) -> dict:
    reference = schema.get("$ref")
    return {**schema, **root["$defs"][reference.rpartition("/")[2]]} if reference else schema


def _properties(root: dict, schema: dict) -> dict:
    """The keys that a mapping may have, over $ref and allOf."""
    schema = _resolve(root, schema)
    properties = dict(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        if "$ref" in part:
            properties |= _properties(root, part)
    return properties


def _children(root: dict, schema: dict, value: object) -> list[tuple[str, dict, object]]:
    """The parts of a value, each with the schema that describes it: (key, schema, value)."""
    schema = _resolve(root, schema)
    if isinstance(value, list):
        items = schema.get("items", {})
        return [(f"[{number}]", items, item) for number, item in enumerate(value, start=1)]
    if not isinstance(value, dict):
        return []
    properties = _properties(root, schema)
    if properties:
        return [(key, properties[key], value[key]) for key in value if key in properties]
    names = schema.get("additionalProperties")
    return [(key, names, value[key]) for key in value] if isinstance(names, dict) else []


def _refuse_unknown_keys(root: dict, schema: dict, value: object, path: str) -> None:
    if isinstance(value, dict) and (known := _properties(root, schema)):
        for key in value:
            if key not in known:
                raise ConfigError(
                    f"{_join(path, key)}: unknown key{nearest(key, known)}; allowed are: "
                    f"{', '.join(sorted(known))}"
                )
    for key, part, item in _children(root, schema, value):
        _refuse_unknown_keys(root, part, item, _join(path, key))


def _refuse_wrong_values(schema: dict, config: dict) -> None:
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(config))
    if not errors:
        return
    error = min(errors, key=lambda each: ("unevaluated" in each.validator, len(each.path)))
    while error.context:
        error = error.context[0]
    path = ""
    for part in error.absolute_path:
        path = _join(path, f"[{part + 1}]" if isinstance(part, int) else part)
    raise ConfigError(f"{path or 'config'}: {_what_is_wrong(error)}")


def _with_typed_text(root: dict, schema: dict, value: object) -> object:
    """Read text as the number that the schema expects, wherever it can be read as one.

    YAML takes 1e-4 for text, and `--config key={inner: 2}` hands every inner value over as text.
    """
    schema = _resolve(root, schema)
    if isinstance(value, str):
        return _typed(value, schema)
    if isinstance(value, float):
        return _whole_or_finite(value, _kinds(schema))
    parts = {
        key: _with_typed_text(root, part, item)
        for key, part, item in _children(root, schema, value)
    }
    if isinstance(value, list):
        return list(parts.values())
    return {**value, **parts} if isinstance(value, dict) else value


def _typed(text: str, schema: dict) -> object:
    kinds = _kinds(schema)
    words = {"true": (True, "boolean"), "false": (False, "boolean"), "null": (None, "null")}
    if text in words and words[text][1] in kinds:
        return words[text][0]
    for each in schema.get("enum", []):
        if text == ("null" if each is None else str(each)):
            return each
    for kind, read in (("integer", int), ("number", float)):
        if kind in kinds:
            with suppress(ValueError):
                return _whole_or_finite(read(text), kinds)
    return text


def _kinds(schema: dict) -> list[str]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _whole_or_finite(value: float, kinds: list[str]) -> object:
    """64.0 as 64 where an integer is expected; NaN and infinity as text, which is no number."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if "integer" in kinds and value == int(value) else value


def _what_is_wrong(error: jsonschema.ValidationError) -> str:
    found, rule = error.instance, error.validator_value
    match error.validator:
        case "required":
            missing = next(key for key in rule if key not in found)
            return f"the key {missing!r} is missing{_described(error.schema, missing)}"
        case "enum":
            allowed = ", ".join("null" if each is None else str(each) for each in rule)
            return f"{found!r} is not allowed{nearest(str(found), rule)}; allowed are: {allowed}"
        case "type":
            kinds = rule if isinstance(rule, list) else [rule]
            return f"found {found!r}, expected {' or '.join(kinds)}"
        case "minItems" | "minProperties":
            return f"has {len(found)} entries, and needs at least {rule}"
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            bound = {
                "minimum": "at least",
                "exclusiveMinimum": "more than",
                "maximum": "at most",
                "exclusiveMaximum": "less than",
            }[error.validator]
            return f"found {found}, expected {bound} {rule}"
        case "pattern":
            return f"found {found!r}, expected text like {rule} ({error.schema.get('description')})"
        case _:
            return error.message


def _described(schema: dict, key: str) -> str:
    description = schema.get("properties", {}).get(key, {}).get("description", "")
    return f" ({description})" if description else ""


def with_defaults(root: dict, schema: dict, value: object) -> object:
    """Fill in the defaults of a mapping's own properties, down through nested mappings.

    Training keys reach backends and runs over `allOf`, which is not followed here: there they are
    overrides, and a default would override what `training` says.
    """
    schema = _resolve(root, schema)
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {key: part["default"] for key, part in properties.items() if "default" in part}
    filled |= value
    for key, part, item in _children(root, schema, filled):
        filled[key] = with_defaults(root, part, item)
    return in_key_order(filled)


def nearest(name: str, known: Iterable) -> str:
    """Words that offer the valid name closest to a wrong one, or nothing."""
    close = difflib.get_close_matches(str(name), [str(each) for each in known], n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _join(path: str, key: str) -> str:
    return f"{path}{key}" if key.startswith("[") else f"{path}.{key}" if path else str(key)
