# Needs: the rows of all runs. Makes: the comparison as table, text, database and plots.


rule summarize_runs:
    """One table over all runs, as CSV, as text for people, and with every step as a database."""
    input:
        rows=files_of_runs("row.json"),
        steps=files_of_runs("steps.jsonl"),
        memory=files_of_runs("memory.jsonl"),
        examples=examples_stats(),
        stats=rules.read_sessions.output.stats,
        code=code_of("summarize_runs"),
    output:
        table="<results>/summary.csv",
        text=report(
            "<results>/summary.md",
            caption="../report/summary.rst",
            category="Summary",
            labels=labels_of_study("comparison"),
        ),
        database="<results>/study.sqlite",
    log:
        "<logs>/summarize_runs/all.log",
    conda:
        "../envs/summary.yaml"
    params:
        study=study.name,
    script:
        "../workflow_scripts/summarize_runs.py"


rule plot_runs:
    """Loss by step, speed and memory of all runs, and the steps of each run."""
    input:
        rows=files_of_runs("row.json"),
        steps=files_of_runs("steps.jsonl"),
        code=code_of("plot_runs"),
    output:
        loss=plot_of_study("loss", "loss by step"),
        speed=plot_of_study("speed", "speed"),
        memory=plot_of_study("memory", "memory"),
        runs=plots_of_runs(),
    log:
        "<logs>/plot_runs/all.log",
    conda:
        "../envs/summary.yaml"
    script:
        "../workflow_scripts/plot_runs.py"


rule summarize_present:
    """The summary of the runs that are there, in results/{study}/present/, naming what is missing."""
    input:
        code=code_of("summarize_present"),
    log:
        "<logs>/summarize_present/all.log",
    conda:
        "../envs/summary.yaml"
    params:
        study=study.name,
        runs=[run.folder for run in study.runs],
        results=f"results/{study.name}",
    script:
        "../workflow_scripts/summarize_present.py"
