# Needs: session files of the agent, wherever they are. Makes: conversations, split in two.


rule snapshot_sessions:
    """Copy or fetch the raw session files once; -R snapshot_sessions takes in new ones."""
    input:
        code=code_of("snapshot_sessions"),
    output:
        raw=directory("<results>/raw"),
        manifest="<results>/manifest.json",
    log:
        "<logs>/snapshot_sessions/all.log",
    conda:
        "../envs/data.yaml"
    params:
        source=keys(study.sessions, "source", "paths", "repo", "revision", "redact"),
    script:
        "../workflow_scripts/snapshot_sessions.py"


rule read_sessions:
    """Read the session files as the agent itself would, into conversations and rejected lines."""
    input:
        raw=ancient(rules.snapshot_sessions.output.raw),  # the manifest tells whether it changed
        manifest=rules.snapshot_sessions.output.manifest,
        code=code_of("read_sessions"),
    output:
        conversations="<results>/sessions/conversations.jsonl",
        rejected="<results>/sessions/rejected.jsonl",
        stats="<results>/sessions/stats.json",
    log:
        "<logs>/read_sessions/all.log",
    conda:
        "../envs/data.yaml"
    params:
        reading=keys(study.sessions, "leaves", "salvage"),
    script:
        "../workflow_scripts/read_sessions.py"


rule split_sessions:
    """Put whole families of sessions into training or validation."""
    input:
        conversations=rules.read_sessions.output.conversations,
        code=code_of("split_sessions"),
    output:
        train="<results>/sessions/train.jsonl",
        val="<results>/sessions/val.jsonl",
    log:
        "<logs>/split_sessions/all.log",
    conda:
        "../envs/data.yaml"
    params:
        split=study.split,
    script:
        "../workflow_scripts/split_sessions.py"
