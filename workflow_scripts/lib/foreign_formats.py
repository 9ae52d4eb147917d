"""Names what a file is when it is no pi session: other versions, manifests, other tools' logs."""

from workflow_scripts.lib.lines import shown

KNOWN_VERSIONS = (1, 2, 3)
PI_ENTRY_TYPES = (
    "message",
    "model_change",
    "thinking_level_change",
    "compaction",
    "branch_summary",
    "custom",
    "custom_message",
    "label",
    "session_info",
    "active_tools_change",
    "leaf",
)


def version_of(header: dict) -> int | None:
    """Version of a session header: 1 where there is none (as pi), None where it is not known."""
    version = header.get("version")
    if version is None:
        return 1
    if isinstance(version, str) and version.strip() in ("1", "2", "3"):
        return int(version)
    if isinstance(version, bool) or not isinstance(version, int | float):
        return None
    return int(version) if version in KNOWN_VERSIONS else None


def why_no_session(value: object) -> tuple[str, str] | None:
    """Say why a file's first JSON value can't open a session: (reason, detail), or None if it can.

    pi wants an object of type "session" with a string id; versions above 3 are other formats.
    """
    if not isinstance(value, dict):
        return "not-a-session", "the first line is no JSON object; expected a pi session header"
    if value.get("type") == "session":
        if version_of(value) is None:
            found = shown(value.get("version"))
            return "unsupported-version", f"session version {found}; versions 1, 2 and 3 are read"
        if not isinstance(value.get("id"), str) or not value["id"]:
            return "header-without-id", "the session header has no id (a string is expected)"
        return None
    if "v" in value and value.get("kind") == "header":
        version = shown(value["v"])
        return (
            "unsupported-version",
            f"pi-agent-core format {version}; versions 1, 2 and 3 are read",
        )
    if value.get("type") in ("session_meta", "response_item", "event_msg", "turn_context"):
        return "codex-session", "a Codex rollout file; only pi sessions are read"
    if "record_type" in value or ("instructions" in value and "timestamp" in value):
        return "codex-session", "a Codex rollout file; only pi sessions are read"
    if "sessionId" in value or "parentUuid" in value or "leafUuid" in value:
        return "claude-session", "a Claude Code session; only pi sessions are read"
    if value.get("type") in PI_ENTRY_TYPES:
        return "missing-header", "entries of a pi session without its header line (type session)"
    if any(key in value for key in ("sha256", "hash", "files", "file", "path", "filename")):
        return "manifest", "a list of files, not a session"
    return "not-a-session", "the first object is no pi session header (type session with an id)"
