"""Which lock a training takes, and where it lies."""

import fcntl
import os
from pathlib import Path

import pytest

from workflow_scripts.lib import device_lock


@pytest.mark.parametrize(
    ("device", "platform", "environment", "nvidia", "name"),
    [
        ("auto", "darwin", {}, False, "gpu"),
        ("mps", "darwin", {}, False, "gpu"),  # the same GPU as
        ("metal", "darwin", {}, False, "gpu"),
        ("cpu", "darwin", {}, False, "cpu"),
        ("auto", "linux", {}, False, "cpu"),
        ("auto", "linux", {}, True, "cuda-0"),
        ("cuda", "linux", {}, False, "cuda-0"),
        ("cpu", "linux", {}, True, "cpu"),
        ("auto", "linux", {"CUDA_VISIBLE_DEVICES": ""}, True, "cpu"),
        ("auto", "linux", {"CUDA_VISIBLE_DEVICES": "-1"}, True, "cpu"),
        ("cuda", "linux", {"CUDA_VISIBLE_DEVICES": "3,1"}, True, "cuda-3"),
    ],
)
def test_a_device_has_one_name(monkeypatch, device, platform, environment, nvidia, name):
    monkeypatch.setattr(device_lock, "_nvidia_here", lambda: nvidia)
    assert device_lock.device_name(device, platform, environment) == name


def test_locks_lie_in_the_cache_of_the_user():
    home = Path("/home/a")
    folder = device_lock.lock_folder
    assert folder("linux", {}, home) == home / ".cache/pi-finetune-workflow"
    assert folder("darwin", {}, home) == home / "Library/Caches/pi-finetune-workflow"
    assert folder("darwin", {"XDG_CACHE_HOME": "/x"}, home) == Path("/x/pi-finetune-workflow")


def test_without_a_home_to_write_in_they_lie_with_temporary_files(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file/below"))
    monkeypatch.setattr(device_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    with device_lock.alone_on("cpu", "a run"):
        (lock,) = tmp_path.glob("pi-finetune-workflow-*/*-cpu.lock")
        assert lock.read_text() == f"a run (process {os.getpid()})"


def test_the_lock_is_held_and_given_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with device_lock.alone_on("cuda-GPU-1/2", "a run") as descriptor:
        assert os.get_inheritable(descriptor) is False, "it is passed on by name alone"
        (lock,) = tmp_path.rglob("*.lock")
        with open(lock) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with device_lock.alone_on("cuda-GPU-1/2", "another run"):
        pass
    assert capsys.readouterr().out == ""


def test_who_waits_is_told_who_holds_it_and_can_leave(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def leave():
        raise SystemExit("Snakemake is gone")

    with device_lock.alone_on("cpu", "results/a/state/run"):
        with pytest.raises(SystemExit), device_lock.alone_on("cpu", "another", leave):
            raise AssertionError("both hold it")
        said = capsys.readouterr().out
        assert f"waiting: results/a/state/run (process {os.getpid()}) holds the cpu" in said
