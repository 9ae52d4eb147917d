"""Golden counts on real session files, which lie beside the repository where there are any."""

import csv
from pathlib import Path

import pytest
from session_maker import read_raw, write_manifest

from workflow_scripts.lib import conversations, entries, messages, trees

FOLDER = Path(__file__).resolve().parents[2] / "shared/pi-sessions"
COUNTS = FOLDER / "COUNTS.tsv"

pytestmark = pytest.mark.skipif(
    not COUNTS.exists(), reason=f"no real session files in {FOLDER}; they are not in the repository"
)


def expected():
    if not COUNTS.exists():
        return []
    with open(COUNTS, encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def is_assistant(entry):
    message = entry.data.get("message")
    return isinstance(message, dict) and message.get("role") == "assistant"


@pytest.mark.parametrize("row", expected(), ids=lambda row: row["file"])
def test_counts_of_a_file(row):
    reading = entries.read_file(FOLDER / row["file"], row["file"])
    [session] = reading.sessions
    tree = trees.link(session)
    [tip], warnings = trees.tips(session, tree, "active")
    path = trees.path_to(tree, tip)
    epoch = conversations.epochs_of(tree, path)[-1]
    shown = [tree.entries[path[place]] for place in (*epoch.kept, *epoch.new)]
    in_context = ("message", "custom_message", "branch_summary")
    trained = [
        number
        for number in path
        if is_assistant(tree.entries[number])
        and (piece := messages.piece_of(tree.entries[number].data, "")).turn
        and not piece.why
    ]
    assert warnings == reading.rejected == []
    found = {
        "malformed_lines": len(reading.rejected),
        "entries": len(tree.entries),
        "leaves": len(trees.tips(session, tree, "all")[0]),
        "active_path_entries": len(path),
        "final_context_messages": sum(entry.data["type"] in in_context for entry in shown)
        + (epoch.compaction is not None),
        "assistants_all": sum(map(is_assistant, tree.entries)),
        "assistants_on_path": sum(is_assistant(tree.entries[number]) for number in path),
        "trainable_on_path": len(trained),
    }
    assert found == {key: int(row[key]) for key in found}


def read_files(tmp_path, rows):
    write_manifest(tmp_path, FOLDER, [row["file"] for row in rows])
    return read_raw(tmp_path, FOLDER)


@pytest.mark.parametrize("row", expected(), ids=lambda row: row["file"])
def test_each_trainable_turn_is_supervised_once_over_the_epochs(tmp_path, row):
    _, _, stats = read_files(tmp_path, [row])
    assert stats["supervised_turns"] == int(row["trainable_on_path"])


def test_the_whole_corpus(tmp_path):
    records, _, stats = read_files(tmp_path, expected())
    total = sum(int(row["trainable_on_path"]) for row in expected())
    # Two of the files are copies of one session's beginning and share one answer.
    assert stats["unsupervised"] == {"supervised-elsewhere": 1}
    assert stats["supervised_turns"] == total - 1
    assert stats["lines_rejected"] == 0
    assert stats["rejected"] == {"no-conversation": 1}  # its one answer was aborted
    epochs = [len(r["turns"]) for r in records if r["file"].endswith("before-compaction.jsonl")]
    assert len(epochs) == 3
