"""What many tests share: a small model folder made on the spot, its template taken apart."""

from pathlib import Path
from typing import NamedTuple

import pytest

from workflow_scripts.lib import jsonl, matmul_peak
from workflow_scripts.make_model import make_model

matmul_peak.SECONDS = 0.02  # of every run; the figure itself has a test of its own

WORDS = (
    "Read the file src/main.py and fix the failing test, then run pytest again.\n\n"
    "def add(a, b):\n    return a + b\n\n    1  import os\n$ ls -la\ntotal 8\n"
    '{"name": "bash", "arguments": {"command": "ls", "path": "a.txt"}}\n'
    "user assistant system tool_response <tool_response>\n</tool_response> Tools function\n"
)


class Prepared(NamedTuple):
    """A tokenizer as people load it, and its two parts as we use it."""

    tokenizer: object
    chat: object
    coder: object

    def __repr__(self) -> str:  # or a failing property test prints the whole vocabulary
        return "Prepared(...)"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Qwen 2 model of a few thousand parameters with its own tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    corpus = folder / "corpus.jsonl"
    jsonl.write_jsonl(corpus, [{"turns": [{"role": "user", "text": WORDS}]}])
    make_model(
        folder / "small", corpus, vocabulary=400, hidden_size=32, intermediate_size=64, heads=2
    )
    return folder / "small"


@pytest.fixture(scope="session")
def prepared(model_folder) -> Prepared:
    return prepare(model_folder)


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    """The real Qwen 2.5 tokenizer, where a copy lies beside the repository."""
    folder = Path(__file__).parents[2] / "shared" / "qwen2.5-tokenizer"
    if not folder.is_dir():
        pytest.skip("no copy of Qwen 2.5's tokenizer in ../shared/qwen2.5-tokenizer")
    return folder


@pytest.fixture(scope="session")
def qwen(qwen_folder) -> Prepared:
    return prepare(qwen_folder)


def prepare(folder: Path) -> Prepared:
    from transformers import AutoTokenizer

    from workflow_scripts.lib.template_proof import load_chat

    return Prepared(AutoTokenizer.from_pretrained(str(folder)), *load_chat(folder, tools=True))
