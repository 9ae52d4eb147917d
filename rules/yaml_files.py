"""Studies as YAML files: what Snakemake's own loader lets pass."""

from pathlib import Path

import yaml

from rules.contract import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice, where YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: the key {key!r} is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


def refuse_repeated_keys(path: str | Path) -> None:
    """Raise ConfigError naming file and line where a mapping gives a key twice."""
    try:
        yaml.load(Path(path).read_text("utf-8"), _Loader)  # a SafeLoader
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from None
