"""Meters of memory, on literal texts of systems that are not here and on this one."""

import math
import os
import struct
import subprocess
import sys
from collections import namedtuple

import psutil
import pytest
from job_maker import wait_until

from workflow_scripts.lib import meters


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("total = 2048.00M  used = 1012.25M  free = 1035.75M  (encrypted)\n", 1_061_421_056),
        ("vm.swapusage: total = 0.00M  used = 0.00M  free = 0.00M  (encrypted)\n", 0),
        ("total = 3072,00M  used = 2100,50M  free = 971,50M  (encrypted)\n", 2_202_533_888),
        ("total = 12.00G  used = 11.50G  free = 512.00M", 12_348_030_976),
        ("total = 1024.00K  used = 12.00K  free = 1012.00K", 12_288),
    ],
)
def test_swap_as_macos_prints_it(text, used):
    assert meters.parse_swap_usage(text) == used


@pytest.mark.parametrize("text", ["", "sysctl: unknown oid 'vm.swapusage'", "used = many"])
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match=r"sysctl vm.swapusage: .* names no used swap"):
        meters.parse_swap_usage(text)


def test_sysctl_is_asked_on_a_mac_where_psutil_fails(tmp_path, monkeypatch):
    program = tmp_path / "sysctl"
    text = "total = 2.00G  used = 1.00G  free = 1.00G"
    program.write_text(f'#!/bin/sh\n[ "$*" = "-n vm.swapusage" ] && echo "{text}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def fail():
        raise OSError("sysctl(CTL_VM, VM_SWAPUSAGE)")

    monkeypatch.setattr(meters.psutil, "swap_memory", fail)
    assert meters.swap_used_bytes() == 0, "elsewhere there is nobody else to ask"
    monkeypatch.setattr(meters.sys, "platform", "darwin")
    assert meters.swap_used_bytes() == 2**30


def test_the_footprint_lies_where_macos_puts_it():
    """struct rusage_info_v0: a UUID, then user, system, idle and interrupt wakeups, pageins, wired,
    resident, footprint, start, exit."""
    usage = struct.pack("=16s10Q", b"uuid", 1, 2, 3, 4, 5, 6, 7, 8_500_000_000, 9, 10)
    assert len(usage) == meters.RUSAGE_BYTES
    assert meters.footprint_in(usage) == 8_500_000_000


def test_a_mac_is_asked_for_each_process(monkeypatch):
    class Library:
        def proc_pid_rusage(self, pid, flavor, buffer):
            assert flavor == meters.RUSAGE_INFO_V0
            if pid == 3:
                return -1  # gone
            buffer[:] = struct.pack("=16s10Q", b"", *[0] * 7, pid * 1000, 0, 0)
            return 0

    Process = namedtuple("Process", "pid")
    monkeypatch.setattr(meters, "_libproc", Library)
    monkeypatch.setattr(meters.sys, "platform", "darwin")
    tree = meters.ProcessTree(os.getpid())
    tree.members, tree.listed = {Process(pid): None for pid in (1, 2, 3)}, math.inf
    assert tree.footprint() == 3000


def test_the_footprint_of_one_process_is_what_it_takes():
    code = "kept = b'x' * 200_000_000; print('ready', flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        tree = meters.ProcessTree(child.pid)
        assert 200e6 < tree.footprint() < 260e6
        child.kill()
        child.wait()
        assert tree.footprint() == 0


FORKED = """
import os, time
kept = b"x" * 200_000_000
os.fork()
os.fork()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="no PSS here")
def test_pages_that_processes_share_count_once():
    with subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        tree = meters.ProcessTree(child.pid)
        wait_until(lambda: len(tree.list()) == 4)
        assert 200e6 < tree.footprint() < 300e6
        family = list(tree.members)
        child.kill()
        child.wait()
        assert len(tree.list()) == 3, "they outlive their parent, and are still known"
        tree.kill()
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


def test_a_process_that_is_gone_counts_nothing():
    tree = meters.ProcessTree(2**22 + 1)
    assert tree.footprint() == 0
    tree.kill()


@pytest.mark.parametrize(
    ("files", "counted"),
    [
        ({"user/job/memory.events": "low 0\nhigh 3\noom 2\noom_kill 2\n"}, 2),
        ({"memory.events": "oom_kill 5\n"}, 5),  # a container sees its own group as the root
        (
            {"memory/user/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"},
            7,
        ),
        ({"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"}, 4),
    ],
)
def test_kills_are_counted_by_the_control_group(tmp_path, monkeypatch, files, counted):
    """Where a process is in a group of either version, under the paths that both kernels use."""
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    lines = "5:cpu,cpuacct:/other\n4:memory:/user/job\n0::/user/job\n"
    read = meters.Path.read_text
    monkeypatch.setattr(
        meters.Path,
        "read_text",
        lambda path, *a, **k: lines if path.name == "cgroup" else read(path, *a, **k),
    )
    assert meters.kernel_oom_kills(root=tmp_path) == counted


def test_kills_are_counted_by_the_machine_where_no_group_does(tmp_path):
    found = meters.kernel_oom_kills(root=tmp_path)
    assert found is None or found >= 0
    assert (found is None) == (not os.path.exists("/proc/vmstat"))
