"""Rule read_sessions: raw session files -> conversations, what was rejected, and counts."""

import json
from collections import Counter
from pathlib import Path

from workflow_scripts.lib import corpus, joblog, jsonl, pool


def read_sessions(
    raw_folder: str | Path,
    manifest_file: str | Path,
    conversations_file: str | Path,
    rejected_file: str | Path,
    stats_file: str | Path,
    leaves: str = "active",
    salvage: bool = False,
) -> None:
    """Read the files that the manifest lists, and write what they hold.

    leaves: "active" (the path to the last entry) or "all" (every branch).
    salvage: split objects glued on one line, and take NUL bytes off lines.
    Raises ValueError where no turn is left to train on.
    """
    manifest = jsonl.read_json(manifest_file)
    processes = pool.processes_for(sum(file["bytes"] for file in manifest["files"]))
    names = [file["file"] for file in manifest["files"]]
    counts = corpus.Counts()
    with jsonl.atomic_writer(rejected_file) as rejected:

        def reject(record: dict) -> None:
            rejected.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")

        with jsonl.atomic_writer(conversations_file) as conversations:
            conversations.buffer.writelines(
                corpus.lines(Path(raw_folder), names, leaves, salvage, counts, reject, processes)
            )
    stats = corpus.stats_of(counts)
    secrets = sum((Counter(file.get("redacted")) for file in manifest["files"]), Counter())
    stats |= {"redacted": dict(secrets), "skipped_files": len(manifest["skipped"])}
    jsonl.write_json(stats_file, stats)
    joblog.say(
        "{conversations} conversations with {supervised_turns} supervised turns from {sessions} "
        "sessions in {files} files; {lines_rejected} of {lines_read} lines rejected".format(**stats)
    )
    if not stats["supervised_turns"]:
        raise ValueError(
            f"no turn to train on in the {stats['files']} files of {raw_folder}. Rejected: "
            f"{stats['rejected'] or 'nothing'}; turns removed: {stats['removed'] or 'none'}; kept "
            f"as context only: {stats['unsupervised'] or 'none'}. Point `sessions` at pi session "
            "files with finished answers"
        )


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        read_sessions(
            snakemake.input.raw,
            snakemake.input.manifest,
            snakemake.output.conversations,
            snakemake.output.rejected,
            snakemake.output.stats,
            **snakemake.params.reading,
        )
