"""A training job as Snakemake starts one, in a process of its own, with a made-up trainer."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = """
import json
from workflow_scripts.lib import guard, joblog
from workflow_scripts.lib.launch import train_and_publish

with open("job.json") as file:
    arguments = json.load(file)
guard.GRACE_SECONDS = arguments.pop("grace_seconds")
with joblog.to_file(arguments["log_file"]):
    train_and_publish(**arguments)
"""
SETTINGS = {
    "engine_installed": True,
    "engine": "torch",
    "device": "cpu",
    "context": 128,
    "optimizer_steps": 8,
    "effective_batch": 4,
    "micro_batch": 4,
    "gradient_checkpointing": False,
    "learning_rate": 0.01,
    "bits": None,
}
LIMITS = {
    "limit_bytes": None,
    "swap_growth_bytes": None,
    "swap_window_seconds": 0,
    "mps_watermark": None,
    "timeout_seconds": None,
    "checkpoint_seconds": 300,
}


class Job:
    """One job in a folder of its own; `trainer` is the source of the module that is the child."""

    def __init__(
        self, folder, trainer, state="state/run", settings=None, limits=None, grace_seconds=3
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state = self.folder / state
        self.log = self.folder / "job.log"
        (self.folder / "job.py").write_text(JOB)
        (self.folder / "fake_trainer.py").write_text(trainer)
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors", "../start", "../train", "../val"):
            (model / name).write_text("{}")
        self.arguments = {
            "trainer": "fake_trainer",
            "settings": {**SETTINGS, **(settings or {})},
            "limits": {**LIMITS, **(limits or {})},
            "model_folder": "model",
            "initial_adapter": "start",
            "train_file": "train",
            "val_file": "val",
            "code": ["fake_trainer.py"],
            "state_folder": str(state),
            "row_file": "out/row.json",
            "steps_file": "out/steps.jsonl",
            "memory_file": "out/memory.jsonl",
            "adapter_folder": "out/adapter",
            "log_file": "job.log",
            "grace_seconds": grace_seconds,
        }
        self.write()

    @property
    def command(self):
        return [sys.executable, "job.py"]

    def write(self):
        (self.folder / "job.json").write_text(json.dumps(self.arguments))

    def environment(self, **changes):
        """That of a job: the project importable, locks of its own."""
        own = {"PYTHONPATH": f"{ROOT}:{self.folder}", "XDG_CACHE_HOME": str(self.folder / "cache")}
        return {**os.environ, **own, **changes}

    def start(self, prefix=(), **environment):
        return subprocess.Popen(
            [*prefix, *self.command],
            cwd=self.folder,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, prefix=(), timeout=120, **environment):
        """Run it to its end; return its exit code and what it said."""
        job = self.start(prefix, **environment)
        said, _ = job.communicate(timeout=timeout)
        return job.returncode, said

    @property
    def row(self):
        file = self.folder / "out/row.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def samples(self):
        lines = (self.state / "memory.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def wait_until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.05)
