"""Tool schemas: cleaned where a session declares them, inferred from its calls where it doesn't."""

from workflow_scripts.lib.messages import is_plain

JSON_TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"))


def declared(tool: object) -> dict | None:
    """Return a declared tool as {name, description, parameters}, None if it has no name."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        return None
    description, parameters = tool.get("description"), tool.get("parameters")
    if not isinstance(parameters, dict) or not is_plain(parameters):
        parameters = {"type": "object", "properties": {}}
    return {
        "name": tool["name"],
        "description": description if isinstance(description, str) else "",
        "parameters": parameters,
    }


def inferred(calls: list[dict]) -> list[dict]:
    """Infer the tools behind calls ({name, arguments}); sorted, so the calls' order is no matter.

    A parameter is required when every call of the tool gives it.
    """
    arguments: dict[str, list[dict]] = {}
    for call in calls:
        arguments.setdefault(call["name"], []).append(call["arguments"])
    return [
        {"name": name, "description": "", "parameters": _schema(arguments[name])}
        for name in sorted(arguments)
    ]


def _schema(values: list) -> dict:
    types = sorted({_type(value) for value in values})
    if "number" in types and "integer" in types:
        types.remove("integer")
    schema: dict = {"type": types[0] if len(types) == 1 else types}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        names = sorted({name for value in objects for name in value})
        schema["properties"] = {
            name: _schema([value[name] for value in objects if name in value]) for name in names
        }
        required = [name for name in names if all(name in value for value in objects)]
        if required:
            schema["required"] = required
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = _schema(items)
    return schema


def _type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "object" if isinstance(value, dict) else "array"
    return next(name for kind, name in JSON_TYPES if isinstance(value, kind))
