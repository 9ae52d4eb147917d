"""How endings are named, on the literal texts of engines."""

import re

import pytest

from workflow_scripts.lib import endings
from workflow_scripts.lib.endings import Evidence
from workflow_scripts.lib.limits import Stop

GB = 1_000_000_000
PLENTY = Evidence(oom_kills=0, available_bytes=6 * GB, total_bytes=16 * GB, process_bytes=9 * GB)
OUT_OF_MEMORY = {
    "torch on mps": "RuntimeError: MPS backend out of memory (MPS allocated: 9.05 GB, other "
    "allocations: 1.02 GB, max allowed: 9.07 GB). Tried to allocate 593.50 MB on private pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause "
    "system failure).",
    "torch on cuda": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU "
    "0 has a total capacity of 139.81 GiB of which 1.56 GiB is free.",
    "torch on cuda, a kernel": "torch.AcceleratorError: CUDA error: out of memory",
    "torch on cuda, a library": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
    "`cublasCreate(handle)`",
    "torch on the cpu": "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes. "
    "Error code 12 (Cannot allocate memory)",
    "mlx on metal, a command": "libc++abi: terminating due to uncaught exception of type "
    "std::runtime_error: [METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "mlx on metal, a buffer": "RuntimeError: [metal::malloc] Attempting to allocate 30064771072 "
    "bytes which is greater than the maximum allowed buffer size of 9534832640 bytes.",
    "mlx, any": "RuntimeError: [malloc] Unable to allocate 40000000000 bytes.",
    "mlx on metal, older": "RuntimeError: [malloc_or_wait] Unable to allocate 40000 bytes.",
    "mlx on cuda": "RuntimeError: cudaMallocAsync(&data, size, stream) failed: out of memory",
    "mlx on cuda, host": "RuntimeError: cudaMallocHost(&b, sizeof(int)) failed: out of memory",
    "numpy": "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array",
    "python": "MemoryError",
    "c++": "terminate called after throwing an instance of 'std::bad_alloc'",
    "a fork": "OSError: [Errno 12] Cannot allocate memory",
}
WATCHDOG = {
    "mlx": "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] "
    "Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
    "mlx, screen": "RuntimeError: [METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
    "hang": "Error: command buffer exited with error status. Caused GPU Hang Error "
    "(00000003:kIOGPUCommandBufferCallbackErrorHang)",
}


@pytest.mark.parametrize("exit_code", [1, -6, 134])
@pytest.mark.parametrize("text", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_what_engines_say_without_memory(text, exit_code):
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1', text, ""]
    found = endings.name_ending(exit_code, lines, None, PLENTY)
    assert found.status == "oom"
    assert found.reason.startswith(text[:60])
    assert len(found.reason) <= 300


@pytest.mark.parametrize("exit_code", [1, -6])
@pytest.mark.parametrize("text", WATCHDOG.values(), ids=WATCHDOG.keys())
def test_metals_watchdog(text, exit_code):
    found = endings.name_ending(exit_code, [text], None, PLENTY)
    assert found.status == "crashed"
    assert found.reason.startswith("Metal ended a command that took too long: ")


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: context 4096 is above the 2048 positions",
        "KeyError: 'out of memory'",
        "we had a MemoryError once, said the session",
        "RuntimeError: shape mismatch",
    ],
)
def test_another_exception_is_a_bug_with_the_end_of_the_log(line):
    with pytest.raises(endings.BugError, match=re.escape(f"  | {line}")):
        endings.name_ending(1, ["before", line], None, PLENTY)


def test_sigkill_is_out_of_memory_only_with_evidence():
    killed = PLENTY._replace(oom_kills=1)
    assert endings.name_ending(-9, [], None, killed) == Stop(
        "oom",
        "killed (SIGKILL), and the kernel counted 1 kill(s) for want of memory; the process had "
        "taken 9.00 GB",
    )
    for count in (None, 0):
        exhausted = PLENTY._replace(oom_kills=count, available_bytes=300_000_000)
        found = endings.name_ending(-9, [], None, exhausted)
        assert found.status == "oom"
        assert "only 300 MB of 16.0 GB were still available" in found.reason
    for evidence in (PLENTY, PLENTY._replace(oom_kills=None)):
        with pytest.raises(endings.InterruptedRunError, match="without any sign"):
            endings.name_ending(-9, ["step 3"], None, evidence)


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV", "SIGBUS", "SIGTRAP", "SIGILL"])
def test_an_abort_is_a_crash(name):
    import signal

    number = getattr(signal, name)
    for code in (-number, 128 + number):
        found = endings.name_ending(code, ["step 3", "failed assertion", ""], None, PLENTY)
        assert found == Stop("crashed", f"the engine ended itself ({name}): failed assertion")
    silent = endings.name_ending(-number, [], None, PLENTY)
    assert silent == Stop("crashed", f"the engine ended itself ({name})")


@pytest.mark.parametrize("exit_code", [endings.STOPPED, -15, -2, -1, 143])
def test_an_end_from_outside_is_no_result(exit_code):
    with pytest.raises(endings.InterruptedRunError, match="ended from outside"):
        endings.name_ending(exit_code, ["MPS was here"], None, PLENTY)


def test_what_the_guard_stopped_is_named_by_the_guard():
    swap = Stop("swap", "used swap grew")
    for code in (endings.STOPPED, -9, -15):
        assert endings.name_ending(code, [], swap, PLENTY) == swap
    with pytest.raises(endings.InterruptedRunError, match="no room"):
        endings.name_ending(endings.STOPPED, [], Stop(None, "no room"), PLENTY)
    assert endings.name_ending(0, [], None, PLENTY) is None


def test_torch_survives_failures_of_metal_that_are_none_for_us():
    line = "Error: command buffer exited with error status. (0000000x:{})".format
    memory = line("kIOGPUCommandBufferCallbackErrorOutOfMemory")
    timeout = line("kIOGPUCommandBufferCallbackErrorTimeout")
    assert endings.survived_failure(memory)
    assert endings.survived_failure(timeout)
    assert not endings.survived_failure("step 3 of 8: loss 7.0")
    assert endings.failure_stop(memory).status == "oom"
    assert endings.failure_stop(timeout).status == "crashed"


@pytest.mark.parametrize(
    ("micro", "effective", "checkpointing", "context", "wanted"),
    [
        (
            4,
            4,
            False,
            2048,
            "micro_batch 2 (was 4), or gradient_checkpointing: true, or context 1024",
        ),
        (3, 6, True, 4096, "micro_batch 2 (was 3), or context 2048 (was 4096)"),
        (5, 5, True, 1024, "micro_batch 1 (was 5), or context 512 (was 1024)"),
        (1, 4, True, 1024, "try context 512 (was 1024)"),
        (1, 4, False, 64, "try gradient_checkpointing: true, or context 64"),
    ],
)
def test_the_next_smaller_run(micro, effective, checkpointing, context, wanted):
    settings = {"micro_batch": micro, "effective_batch": effective, "context": context}
    settings["gradient_checkpointing"] = checkpointing
    assert wanted in endings.smaller(settings)
