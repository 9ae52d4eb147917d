"""System prompt and tools of pi 0.86 sessions, which write them as messages of role system.

The first such message of a path opens the conversation; later ones are deltas. What a compaction
has put out of sight is folded into the opening.
"""

from workflow_scripts.lib import observed_tools
from workflow_scripts.lib.messages import text_of


def sections_of(message: dict) -> dict[str, str | None]:
    """Texts of a system message by section; plain content, where there is some, is "content"."""
    content, _ = text_of(message.get("content"))
    if content.strip():
        return {"content": content}
    sections = message.get("sections")
    return {
        str(name): text if isinstance(text, str) else None
        for name, text in (sections.items() if isinstance(sections, dict) else ())
    }


def tools_added(message: dict) -> dict[str, dict]:
    """Full schemas that a system message adds, by name."""
    added = message.get("toolsAdded")
    tools = [observed_tools.declared(tool) for tool in (added if isinstance(added, list) else ())]
    return {tool["name"]: tool for tool in tools if tool}


def tools_removed(message: dict) -> list[str]:
    """Names that a system message removes (given bare or as objects with a name)."""
    removed = message.get("toolsRemoved")
    names = [
        tool.get("name") if isinstance(tool, dict) else tool
        for tool in (removed if isinstance(removed, list) else ())
    ]
    return [name for name in names if isinstance(name, str)]


def fold(messages: list[dict]) -> tuple[str | None, dict[str, dict]]:
    """Combine system messages in order into one prompt (None without text) and its tools."""
    sections: dict[str, str | None] = {}
    tools: dict[str, dict] = {}
    for message in messages:
        sections.update(sections_of(message))
        tools.update(tools_added(message))
        for name in tools_removed(message):
            tools.pop(name, None)
    text = "\n\n".join(text for text in sections.values() if text and text.strip())
    return text or None, tools


def delta_turn(message: dict, name: str) -> dict | None:
    """System turn of a change in mid-conversation, None where it says nothing.

    Tools have no place in a turn of the chat templates, so their coming and going is put in words.
    """
    texts = [text for text in sections_of(message).values() if text and text.strip()]
    for verb, tools in (("added", tools_added(message)), ("removed", tools_removed(message))):
        if tools:
            texts.append(f"Tools {verb}: {', '.join(sorted(tools))}.")
    return {"role": "system", "text": "\n\n".join(texts), "entry": name} if texts else None
