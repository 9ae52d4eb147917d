"""Which source files a job's result depends on: its script and what that imports of ours."""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = "workflow_scripts"


@cache
def sources_of(root: str, *entries: str) -> tuple[str, ...]:
    """Follow the imports of `entries` through the package; paths relative to `root`, sorted.

    Snakemake tracks neither what a script imports nor the modules of a child process. Listed as
    inputs, small files are compared by content: touching one reruns nothing, editing one reruns
    exactly what depends on it. A file beside a module that the module names in a string
    (a template, say) belongs to it.

    Raises FileNotFoundError when an entry does not exist.
    """
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        tree = ast.parse((Path(root) / path).read_text(encoding="utf-8"), filename=path)
        waiting += _imported(root, tree)
        found.update(_data_files(root, Path(path).parent, tree))
    return tuple(sorted(found))


def _imported(root: str, tree: ast.AST) -> list[str]:
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    paths = [f"{module.replace('.', '/')}.py" for module in modules if _is_ours(module)]
    return [path for path in paths if (Path(root) / path).is_file()]


def _data_files(root: str, folder: Path, tree: ast.AST) -> list[str]:
    names = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[\w-]+\.\w+", node.value)
    }
    return [str(folder / name) for name in names if (Path(root) / folder / name).is_file()]


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(PACKAGE + ".")
