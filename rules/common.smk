"""The checked study, its paths, and the functions that the other files share."""

import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path

import yaml
from rules.retry import retry_command
from rules.sources import sources_of
from rules.study import ConfigError, load_study
from rules.yaml_files import refuse_repeated_keys
from workflow_scripts.lib.jsonl import write_json

try:
    for file in workflow.overwrite_configfiles or [Path(workflow.basedir, "config.yaml")]:
        refuse_repeated_keys(file)
    study = load_study(
        config,
        yaml.safe_load(Path(workflow.basedir, "schemas/config.schema.yaml").read_text("utf-8")),
    )
except ConfigError as error:
    sys.exit(f"Config error: {error}")


pathvars:
    results=f"results/{study.name}",
    logs=f"results/{study.name}/logs",
    benchmarks=f"results/{study.name}/benchmarks",
    examples=f"results/{study.name}/examples/{{tokenizer}}/{{context}}",


wildcard_constraints:
    context=r"\d+",


# Scripts and their children import workflow_scripts.lib from wherever Snakemake runs them.
os.environ.update(PYTHONPATH=workflow.basedir)

# Snakemake writes the interpreter unquoted into the command that starts a script.
if " " in sys.executable and not sys.executable.startswith("'"):
    sys.executable = shlex.quote(sys.executable)


def code_of(script, *children):
    """Source files on which a result depends: its script's, and those of modules it starts."""
    entries = [f"workflow_scripts/{each}.py" for each in (script, *children)]
    paths = sources_of(workflow.basedir, *entries)
    here = Path.cwd() == Path(workflow.basedir)
    return [path if here else f"{workflow.basedir}/{path}" for path in paths]


# Snakemake compares params as a set of values: a 1 and a 2 that change places go unseen. So a rule
# takes its settings as one mapping, with the keys that it uses and no others.
def keys(section, *names):
    """The named keys of a section of the config that are there."""
    return {name: section[name] for name in sorted(names) if name in section}


def without(section, *names):
    """A section of the config without the named keys."""
    return keys(section, *(section.keys() - set(names)))


def one_of(names):
    """Regular expression that matches these names and no others; none at all for no names."""
    return "|".join(re.escape(name) for name in sorted(names)) or "(?!)"


def models_from(*sources):
    return one_of(name for name, model in study.models.items() if model["source"] in sources)


def backends_on(engine):
    return one_of({run.backend for run in study.runs if run.engine == engine})


def tokenizer_folder(wildcards):
    return f"<results>/models/{study.tokenizers[wildcards.tokenizer]}"


def examples_stats():
    folders = sorted({(run.tokenizer, run.context) for run in study.runs})
    return [f"<results>/examples/{name}/{context}/stats.json" for name, context in folders]


def run_of(wildcards):
    return study.run(
        f"{wildcards.backend}/{wildcards.model}/{wildcards.context}/{wildcards.variant}"
    )


def examples_of_run(file):
    def path(wildcards):
        run = run_of(wildcards)
        return f"<results>/examples/{run.tokenizer}/{run.context}/{file}"

    return path


def settings_of_run(wildcards):
    """What a run's result depends on besides its inputs, plain values only.

    Whether its engine is installed is one of them, so that a row that says "unavailable" is made
    again once it is.
    """
    run = run_of(wildcards)
    return {
        **run.settings,
        **run.labels,
        "context": run.context,
        "tokenizer": run.tokenizer,
        "study": study.name,
        "revision": revision_of(run.model),
        "engine": run.engine,
        "engine_installed": engine_installed(run.engine),
    }


def limits_of_run(wildcards, resources):
    """When the guard of a run saves and when it stops it, which changes no figure of the run.

    Snakemake calls params that take resources derived, and reruns nothing when they change.
    """
    return {**study.memory, **run_of(wildcards).limits}


def revision_of(model):
    return study.models[model]["revision"] if study.models[model]["source"] == "hub" else None


def state_of_run(wildcards):
    return f"results/{study.name}/state/{run_of(wildcards).folder}"


def engine_installed(engine):
    """Whether a training can start; a rule's own conda environment is taken to have its engine."""
    if workflow.deployment_settings.deployment_method:
        return True
    packages = {"torch": ("torch", "trl", "peft"), "mlx": ("mlx", "mlx_lm")}[engine]
    return all(importlib.util.find_spec(package) for package in packages)


def initial_adapter_of_run(wildcards):
    run = run_of(wildcards)
    name = f"r{run.settings['lora']['r']}-seed{run.settings['seed']}"
    return f"<results>/initial_adapters/{run.model}/{name}.safetensors"


inputs_of_run = {
    "model": lambda wildcards: f"<results>/models/{run_of(wildcards).weights}",
    "initial_adapter": initial_adapter_of_run,
    "train": examples_of_run("train.jsonl"),
    "val": examples_of_run("val.jsonl"),
    "stats": examples_of_run("stats.json"),
}
outputs_of_run = {
    "row": "<results>/runs/{backend}/{model}/{context}/{variant}/row.json",
    "steps": "<results>/runs/{backend}/{model}/{context}/{variant}/steps.jsonl",
    "memory": "<results>/runs/{backend}/{model}/{context}/{variant}/memory.jsonl",
    "adapter": directory("<results>/runs/{backend}/{model}/{context}/{variant}/adapter"),
}


def files_of_runs(file):
    return [f"<results>/runs/{run.folder}/{file}" for run in study.runs]


def plot(name, caption, category, **labels):
    return report(
        f"<results>/plots/{name}.svg",
        caption=f"../report/{caption}.rst",
        category=category,
        labels=labels,
    )


def plot_of_study(name, what):
    return plot(name, name, "Summary", **labels_of_study(what))


def labels_of_study(what):
    return dict.fromkeys(("backend", "model", "context", "variant"), "all") | {"what": what}


def plots_of_runs():
    """One plot a run, each found in the report under its backend, model and context."""
    return [plot(run.folder, "run", "Runs", **run.labels, what="steps") for run in study.runs]


def leave_runs():
    """Leave the grid, in order, for those who show how far it is; no rule knows of this file."""
    jobs = [job for job in workflow.dag.needrun_jobs() if job.rule.name.startswith("train_")]
    to_train = {run_of(job.wildcards).folder for job in jobs}
    runs = [
        {
            "run": run.folder,
            "optimizer_steps": run.settings["optimizer_steps"],
            "to_train": run.folder in to_train,
        }
        for run in study.runs
    ]
    write_json(Path("results", study.name, "state/runs.json"), {"runs": runs})


def show_retry():
    """Print the command that tries the runs again that ended without a result of their training."""
    retry = retry_command(
        {run.folder: row_of(run) for run in study.runs},
        f"results/{study.name}",
        [str(file) for file in workflow.overwrite_configfiles or []],
        dict(workflow.config_settings.config),
    )
    if retry:
        print(f"\n{retry}", file=sys.stderr)


def row_of(run):
    file = Path("results", study.name, "runs", run.folder, "row.json")
    return json.loads(file.read_text("utf-8")) if file.is_file() else None


def show_summary():
    """Print the comparison and where it lies, once it has been made: the latest, if there are two."""
    folder = Path("results", study.name)
    found = [
        path for path in (folder / "summary.md", folder / "present/summary.md") if path.is_file()
    ]
    if found:
        summary = max(found, key=lambda path: path.stat().st_mtime)
        print(f"\n{summary.read_text('utf-8')}\nSummary: {summary}", file=sys.stderr)
