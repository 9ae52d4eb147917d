"""The guard around a training: each limit and each way to end, provoked for real."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from job_maker import ROOT, Job, wait_until

from workflow_scripts.lib import guard, meters
from workflow_scripts.lib.limits import Limits, Stop, Watch

MB = 1_000_000
HEAD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
state = Path(json.loads(Path(sys.argv[1]).read_text())["state_folder"])
"""
# Saves its work when it is asked to stop, as a trainer does.
POLITE = (
    HEAD
    + """
def save(*_):
    (state / "saved").write_text("")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
"""
)
STUBBORN = HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
FINISH = """
(state / "result.json").write_text(json.dumps({"status": "ok", "reason": None, "last_step": 8}))
"""
GROW = """
kept = []
while True:
    kept.append(b"x" * 10_000_000)
    time.sleep(float(os.environ.get("PAUSE", 0.05)))
"""
SLEEP = "(state / 'here').write_text('')\ntime.sleep(600)\n"


def children_of(job):
    return psutil.Process(job.pid).children(recursive=True)


def all_gone(processes):
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


# --- environment


def test_a_child_has_its_environment_before_it_imports_an_engine(tmp_path):
    trainer = HEAD + "print(json.dumps({'env': dict(os.environ), 'torch': 'torch' in sys.modules}))"
    job = Job(tmp_path, trainer + FINISH)
    loud = {"PYTORCH_ENABLE_MPS_FALLBACK": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0"}
    exit_code, said = job.run(**loud)
    assert exit_code == 0, said
    said = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert said["torch"] is False
    child = said["env"]
    cores = str(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    wanted = {
        "PYTORCH_ENABLE_MPS_FALLBACK": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": cores,
        "VECLIB_MAXIMUM_THREADS": cores,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    assert {key: child[key] for key in wanted} == wanted
    assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO" not in child
    assert "PYTORCH_MPS_LOW_WATERMARK_RATIO" not in child


@pytest.mark.parametrize(
    ("given", "watermark", "limited", "high", "low"),
    [
        ({}, None, False, None, None),
        ({"HIGH": "1.2", "LOW": "1.0"}, None, False, "1.2", "1.0"),  # the user's own stay
        ({}, 1.5, False, "1.5", None),
        ({"LOW": "1.45"}, 1.0, False, "1.0", "1.0"),  # torch refuses a low one above the high one
        ({}, 0, True, "0.0", None),
        ({"HIGH": "0.0"}, None, True, "0.0", None),
        ({"HIGH": "0.0", "LOW": "0.0"}, None, False, None, "0.0"),  # unlimited, and nobody guards
        ({"HIGH": "nonsense"}, None, False, "nonsense", None),  # torch's to refuse
    ],
)
def test_watermarks_are_left_alone_unless_the_config_says(given, watermark, limited, high, low):
    name = "PYTORCH_MPS_{}_WATERMARK_RATIO".format
    environment = {name(key): value for key, value in given.items()}
    child = guard.child_environment(environment, 2, watermark, limited)
    assert (child.get(name("HIGH")), child.get(name("LOW"))) == (high, low)


def test_no_watermark_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="mps_watermark: 0 needs memory"):
        guard.child_environment({}, 2, 0, limited=False)


# --- awake


CAFFEINATE = """#!/bin/sh
echo "$$ $*" >> "$CAFFEINATED"
trap 'exit 0' TERM
while kill -0 "$3" 2>/dev/null; do sleep 0.05; done
"""


@pytest.fixture
def caffeinate(tmp_path, monkeypatch):
    """A stand-in for macOS's program, first on PATH, which says in a file how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "caffeinate"
    program.write_text(CAFFEINATE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CAFFEINATED", str(tmp_path / "called"))
    return tmp_path / "called"


def caffeinated(called):
    wait_until(lambda: called.is_file() and called.read_text().endswith("\n"))
    process, options, flag, pid = called.read_text().split()
    return psutil.Process(int(process)), options, flag, int(pid)


def test_a_mac_is_kept_awake_as_long_as_the_child_lives(tmp_path, caffeinate, monkeypatch):
    monkeypatch.setattr(guard, "sys", SimpleNamespace(platform="darwin"))
    child = subprocess.Popen(["sleep", "60"])
    with guard.keep_awake(child.pid):
        process, options, flag, pid = caffeinated(caffeinate)
        assert (options, flag, pid) == ("-dimsu", "-w", child.pid)
        assert process.is_running()
    assert all_gone([process])
    child.kill()
    child.wait()


def test_other_systems_are_not_kept_awake(caffeinate):
    with guard.keep_awake(os.getpid()):
        pass
    assert not caffeinate.exists()
    assert guard.keep_awake_command("linux", 5) is None


AWAKE_PARENT = """
import sys
from types import SimpleNamespace
from workflow_scripts.lib import guard
guard.sys = SimpleNamespace(platform="darwin")
guard.run_child(["sleep", "60"], guard.child_environment({"PATH": "/bin:/usr/bin"}, 1), "l", "m")
"""


def test_nothing_keeps_a_mac_awake_after_a_guard_was_killed(tmp_path, caffeinate):
    parent = subprocess.Popen(
        [sys.executable, "-c", AWAKE_PARENT], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}
    )
    process, _, _, pid = caffeinated(caffeinate)
    parent.kill()
    parent.wait()
    assert process.is_running()
    os.kill(pid, signal.SIGKILL)  # a trainer would end itself, `sleep` does not
    wait_until(lambda: all_gone([process]))


# --- limits


def test_above_the_memory_limit_a_child_saves_and_is_a_row(tmp_path):
    job = Job(tmp_path, POLITE + GROW, limits={"limit_bytes": 300 * MB})
    exit_code, said = job.run()
    assert exit_code == 0, said
    assert (job.state / "saved").exists()
    row = job.row
    assert row["status"] == "oom"
    assert re.fullmatch(
        r"the process took \d{3} MB, above memory.limit_bytes of 300 MB, after step 0 of 8; "
        r"try micro_batch 2 \(was 4\), or gradient_checkpointing: true, or context 64 \(was 128\)",
        row["reason"],
    )
    assert row["peak_process_bytes"] > 300 * MB
    assert job.samples()[-1]["process_bytes"] > 300 * MB
    assert (tmp_path / "out/adapter").is_dir()


def test_a_child_that_hangs_and_ignores_sigterm_is_killed_at_its_time_limit(tmp_path):
    job = Job(tmp_path, STUBBORN + SLEEP, limits={"timeout_seconds": 1.5}, grace_seconds=1)
    running = job.start()
    wait_until(lambda: (job.state / "here").exists())
    family = children_of(running)
    said, _ = running.communicate(timeout=30)
    assert running.returncode == 0, said
    assert all_gone(family)
    row = job.row
    assert row["status"] == "timeout"
    assert row["reason"].startswith("2 s, above training.timeout_seconds of 1.5, after step 0 of 8")
    assert 2.5 < row["wall_seconds"] < 10


def test_a_training_that_ends_well_while_it_is_stopped_is_ok(tmp_path):
    trainer = HEAD + "signal.signal(signal.SIGTERM, lambda *_: None)\ntime.sleep(2.5)\n" + FINISH
    job = Job(tmp_path, trainer, limits={"timeout_seconds": 1})
    exit_code, said = job.run()
    assert exit_code == 0, said
    assert job.row["status"] == "ok"


GRANDCHILDREN = """
code = "import time; kept = b'x' * 150_000_000; time.sleep(600)"
for own_session in (False, True):
    subprocess.Popen([sys.executable, "-c", code], start_new_session=own_session)
"""


def test_grandchildren_count_and_die_with_the_child(tmp_path):
    job = Job(tmp_path, STUBBORN + GRANDCHILDREN + SLEEP, limits={"limit_bytes": 280 * MB})
    running = job.start()
    wait_until(lambda: len(children_of(running)) == 3)
    family = children_of(running)
    said, _ = running.communicate(timeout=40)
    assert running.returncode == 0, said
    assert all_gone(family)
    assert job.row["status"] == "oom"


def test_grandchildren_die_when_a_child_ends_by_itself(tmp_path):
    job = Job(tmp_path, HEAD + GRANDCHILDREN + "time.sleep(7)\n" + FINISH)
    running = job.start()
    wait_until(lambda: len(children_of(running)) == 3)
    family = children_of(running)
    said, _ = running.communicate(timeout=40)
    assert running.returncode == 0, said
    assert all_gone(family)


def test_a_full_disk_ends_a_training_without_a_row(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        job = Job(disk / "project", POLITE + SLEEP)
        exit_code, said = job.run()
        assert exit_code == 1
        assert "of disk are free, below 1.00 GB: make room and run again" in said
        assert job.row is None
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- swap


def watched(growths, limit=100, window=3.0):
    """The first second at which a growth of used swap stops a training, one sample a second."""
    watch = Watch(Limits(swap_growth_bytes=limit, swap_window_seconds=window), swap_before=1000)
    for second, growth in enumerate(growths):
        if watch.check(float(second), 0, 1000 + growth, 10**12):
            return second
    return None


def test_swap_stops_a_training_only_when_it_grew_much_and_kept_growing():
    assert watched([0, 50, 101, 110, 120, 130, 140]) == 5
    assert watched([0, 50, 200, 200, 200, 200, 200, 200]) is None  # others' memory, moved out once
    assert watched([0, 90, 100, 99, 100, 90, 100]) is None  # never above
    assert watched([0, 101, 102, 90, 101, 102, 103, 104, 106]) == 7  # fell below, begins anew
    assert watched([0, 200, 199, 200, 199, 200, 199, 200]) is None  # a machine is never quite still
    assert watched([0, 0, 300, 300, 300, 300, 310, 330]) == 6  # still, then on again
    assert watched([0, 101], window=0) == 1
    assert watched([-500, -400, 0, 50]) is None  # others gave theirs back


def test_the_words_of_a_stop_by_swap():
    watch = Watch(Limits(swap_growth_bytes=2_000 * MB, swap_window_seconds=0), swap_before=0)
    assert watch.check(1.0, 0, 2_530 * MB, 10**12) == Stop(
        "swap",
        "used swap grew by 2.53 GB, above memory.swap_growth_bytes of 2.00 GB, and kept growing "
        "for 0 s",
    )


def test_a_climbing_swap_meter_ends_a_training_as_a_row(tmp_path):
    job = Job(tmp_path, POLITE + SLEEP, limits={"swap_growth_bytes": MB, "swap_window_seconds": 2})
    script = tmp_path / "job.py"
    meter = (
        "import itertools\nfrom workflow_scripts.lib import meters\n"
        "climbing = itertools.count(5_000_000, 900_000)\n"
        "meters.swap_used_bytes = lambda: next(climbing)\n"
    )
    script.write_text(meter + script.read_text())
    exit_code, said = job.run()
    assert exit_code == 0, said
    row = job.row
    assert row["status"] == "swap"
    assert re.match(
        r"used swap grew by \d MB, above memory.swap_growth_bytes of 1 MB", row["reason"]
    )
    assert row["swap_growth_bytes"] > MB
    assert (job.state / "saved").exists()


@pytest.fixture
def memory_group():
    """Returns a function that makes a control group with a memory limit and returns its folder."""
    made = []

    def make(limit, swappable=False):
        folder = meters.CGROUP_ROOT / "memory" if version_1() else meters.CGROUP_ROOT
        folder = folder / f"test-guard-{os.getpid()}-{len(made)}"
        limits = (
            [("memory.limit_in_bytes", limit)]
            if version_1()
            else [("memory.max", limit), ("memory.swap.max", "max" if swappable else 0)]
        )
        try:
            folder.mkdir()
            made.append(folder)
            for file, value in limits:
                if (folder / file).exists() or file != "memory.swap.max":
                    (folder / file).write_text(str(value))
        except OSError as error:
            pytest.skip(f"control groups of memory cannot be made here ({error})")
        return folder

    yield make
    for folder in made:
        wait_until(lambda folder=folder: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def version_1():
    return (meters.CGROUP_ROOT / "memory/memory.limit_in_bytes").exists()


def inside(group):
    """Words before a command that run it in a control group."""
    return ["sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$@"', "sh"]


def test_real_swap_that_keeps_growing_ends_a_training(tmp_path, memory_group):
    file = tmp_path / "swapfile"
    with open(file, "wb") as swap:
        os.posix_fallocate(swap.fileno(), 0, 400 * MB)
    file.chmod(0o600)
    for command in (["mkswap", str(file)], ["swapon", str(file)]):
        if not shutil.which(command[0]) or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{command[0]}: swap cannot be added here")
    try:
        group = memory_group(200 * MB, swappable=True)
        job = Job(
            tmp_path / "job",
            POLITE + GROW,
            limits={"swap_growth_bytes": 50 * MB, "swap_window_seconds": 2},
        )
        exit_code, said = job.run(inside(group), PAUSE="0.3")
        assert exit_code == 0, said
        row = job.row
        assert row["status"] == "swap", row["reason"]
        assert row["swap_growth_bytes"] > 50 * MB
        used = [sample["swap_used_bytes"] for sample in job.samples()]
        assert used[-1] - used[0] > 50 * MB
    finally:
        subprocess.run(["swapoff", str(file)], check=True)


# --- ends


def test_a_child_that_the_kernel_kills_for_its_memory_is_out_of_memory(tmp_path, memory_group):
    group = memory_group(250 * MB)
    job = Job(tmp_path, POLITE + GROW.replace("0.05", "0.02"))
    exit_code, said = job.run(inside(group))
    assert exit_code == 0, said
    row = job.row
    assert row["status"] == "oom"
    assert re.match(
        r"killed \(SIGKILL\), and the kernel counted 1 kill\(s\) for want of", row["reason"]
    )
    assert "try micro_batch 2" in row["reason"]


def test_a_child_above_an_rlimit_is_out_of_memory(tmp_path):
    job = Job(
        tmp_path,
        HEAD + "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2_000_000_000,) * 2)\n"
        "kept = b'x' * 4_000_000_000\n",
    )
    exit_code, said = job.run()
    assert exit_code == 0, said
    row = job.row
    assert (row["status"], row["reason"].split(",")[0]) == ("oom", "MemoryError")
    assert "Traceback" in row["log_end"]


def test_a_torch_allocation_that_fails_is_out_of_memory(tmp_path):
    job = Job(tmp_path, HEAD + "import torch\ntorch.empty(10**15)\n")
    exit_code, said = job.run()
    assert exit_code == 0, said
    assert job.row["status"] == "oom"
    assert "DefaultCPUAllocator: can't allocate memory" in job.row["reason"]


def test_mlx_on_the_cpu_dies_of_a_failed_allocation_without_a_word(tmp_path):
    """Its CPU allocator returns nothing where it should raise; so that is all we can say."""
    job = Job(tmp_path, HEAD + "import mlx.core as mx\nmx.eval(mx.zeros((10**6, 10**7)) + 1)\n")
    exit_code, said = job.run()
    assert exit_code == 0, said
    assert job.row["status"] == "crashed"
    assert job.row["reason"].startswith("the engine ended itself (SIGSEGV)")


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS])
def test_an_engine_that_aborts_is_a_row(tmp_path, number):
    job = Job(
        tmp_path,
        HEAD + f"print('-[IOGPU x]: failed assertion')\nos.kill(os.getpid(), {int(number)})",
    )
    exit_code, said = job.run()
    assert exit_code == 0, said
    assert job.row["status"] == "crashed"
    assert job.row["reason"].startswith(
        f"the engine ended itself ({number.name}): -[IOGPU x]: failed assertion, after step 0"
    )


def test_what_metal_only_prints_stops_a_training(tmp_path):
    line = (
        "Error: command buffer exited with error status. Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    )
    job = Job(tmp_path, POLITE + f"print({line!r})\n" + SLEEP)
    exit_code, said = job.run(timeout=30)
    assert exit_code == 0, said
    assert job.row["status"] == "oom"
    job = Job(tmp_path / "too late", HEAD + f"print({line!r})\n" + FINISH)
    assert job.run()[0] == 0
    assert job.row["status"] == "oom", "its figures are of buffers that nobody filled"


def test_a_kill_without_a_sign_of_exhausted_memory_is_no_row(tmp_path):
    job = Job(tmp_path, HEAD + "os.kill(os.getpid(), 9)")
    exit_code, said = job.run()
    assert exit_code == 1
    assert "killed (SIGKILL) by somebody, without any sign that memory ran out" in said
    assert job.row is None


def test_a_bug_is_no_row_and_shows_the_end_of_the_log(tmp_path):
    job = Job(tmp_path, HEAD + "raise ArithmeticError('a bug')")
    exit_code, said = job.run()
    assert exit_code == 1
    assert "BugError: it ended with exit code 1; the end of its log:" in said
    assert "  | ArithmeticError: a bug" in said
    assert job.row is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_is_told_to_stop_lets_its_child_save(tmp_path, number):
    job = Job(tmp_path, POLITE + SLEEP)
    running = job.start()
    wait_until(lambda: (job.state / "here").exists())
    family = children_of(running)
    running.send_signal(number)
    said, _ = running.communicate(timeout=20)
    assert running.returncode not in (0, None), said
    assert (job.state / "saved").exists()
    assert all_gone(family)
    assert job.row is None


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    job = Job(tmp_path, STUBBORN + SLEEP, grace_seconds=60)
    running = job.start()
    wait_until(lambda: (job.state / "here").exists())
    family = children_of(running)
    running.send_signal(signal.SIGINT)
    time.sleep(1)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=20)
    assert all_gone(family)


OBEDIENT = (
    HEAD
    + """
from workflow_scripts.lib import under_guard
under_guard.GRACE_SECONDS = 2
request = under_guard.StopRequest()
under_guard.obey(request)
"""
)


def test_after_a_kill_9_of_the_parent_the_child_saves_and_ends(tmp_path):
    trainer = OBEDIENT + (
        "request.deferred = True\n(state / 'here').write_text('')\n"
        "while True:\n    print('on', flush=True)\n    time.sleep(0.05)\n"
        "    if request.made:\n        (state / 'saved').write_text('')\n        sys.exit(75)\n"
    )
    job = Job(tmp_path, trainer)
    running = job.start()
    wait_until(lambda: (job.state / "here").exists())
    family = children_of(running)
    running.kill()
    wait_until(lambda: all_gone(family), seconds=10)
    assert (job.state / "saved").exists()
    running.communicate()


def test_after_a_kill_9_of_the_parent_a_child_that_cannot_save_ends_too(tmp_path):
    job = Job(tmp_path, OBEDIENT + "request.deferred = True\n" + SLEEP)
    running = job.start()
    wait_until(lambda: (job.state / "here").exists())
    family = children_of(running)
    running.kill()
    wait_until(lambda: all_gone(family), seconds=10)
    running.communicate()


# --- one at a time


def test_a_second_training_waits_for_the_device_and_counts_only_its_own_time(tmp_path):
    locks = {"XDG_CACHE_HOME": str(tmp_path / "locks")}
    first = Job(
        tmp_path / "one", HEAD + "(state / 'here').write_text('')\ntime.sleep(6)\n" + FINISH
    )
    second = Job(tmp_path / "two", HEAD + "time.sleep(1)\n" + FINISH)
    running = first.start(**locks)
    wait_until(lambda: (first.state / "here").exists())
    started = time.monotonic()
    exit_code, said = second.run(**locks)
    waited = time.monotonic() - started
    assert exit_code == 0, said
    assert re.search(r"waiting: state/run \(process \d+\) holds the cpu", said)
    assert "waiting:" in second.log.read_text()
    assert running.wait(timeout=1) == 0
    running.communicate()
    assert waited > 4 > second.row["wall_seconds"]


def test_a_rerun_waits_for_the_orphan_of_a_killed_parent(tmp_path):
    orphan = OBEDIENT.replace("= 2", "= 5") + (
        "request.deferred = True\n(state / 'here').write_text('')\n"
        "import fcntl\nwhile True:\n    time.sleep(0.1)\n"
    )
    locks = {"XDG_CACHE_HOME": str(tmp_path / "locks")}
    first = Job(tmp_path / "one", orphan)
    running = first.start(**locks)
    wait_until(lambda: (first.state / "here").exists())
    (child,) = children_of(running)
    running.kill()
    running.communicate()
    assert child.is_running()
    second = Job(tmp_path / "two", HEAD + "print('begins')\n" + FINISH)
    exit_code, said = second.run(**locks)
    assert exit_code == 0, said
    assert said.index("waiting:") < said.index("begins")
    assert all_gone([child])


def test_trainings_on_different_devices_do_not_wait(tmp_path):
    locks = {"XDG_CACHE_HOME": str(tmp_path / "locks"), "CUDA_VISIBLE_DEVICES": "0"}
    first = Job(tmp_path / "one", POLITE + SLEEP)
    second = Job(tmp_path / "two", HEAD + FINISH, settings={"device": "cuda"})
    running = first.start(**locks)
    wait_until(lambda: (first.state / "here").exists())
    exit_code, said = second.run(**locks)
    assert exit_code == 0, said
    assert "waiting" not in said
    running.terminate()
    running.communicate()


# --- samples


def test_samples_hold_what_the_child_reports_of_its_device(tmp_path):
    report = (
        HEAD + "from workflow_scripts.lib import measure, under_guard\n"
        "under_guard.report_device(state / 'device.json', lambda: measure.Memory(5, 7, 9))\n"
        "time.sleep(2.5)\n" + FINISH
    )
    job = Job(tmp_path, report)
    exit_code, said = job.run()
    assert exit_code == 0, said
    last = job.samples()[-1]
    keys = ("device_bytes", "peak_device_bytes", "peak_reserved_bytes")
    assert tuple(last[key] for key in keys) == (5, 7, 9)
    assert last["process_bytes"] > 5 * MB
    assert last["available_bytes"] > 0
    assert last["seconds"] >= 2


def test_a_device_without_counters_reports_nothing(tmp_path):
    from workflow_scripts.lib import measure, under_guard

    under_guard.report_device(tmp_path / "device.json", measure.Memory)
    time.sleep(0.2)
    assert not (tmp_path / "device.json").exists()
