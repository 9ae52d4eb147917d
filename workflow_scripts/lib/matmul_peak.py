"""The fastest matrix product of a device, measured where and when a run trains."""

import time
from collections.abc import Callable

SIZES = (256, 512, 1024, 2048, 4096, 8192)
SECONDS = 1.0
TIMINGS = 3

Product = Callable[[int], Callable[[], None]]


def torch_peak_flops(device: str, dtype: str) -> float:
    """Measure PyTorch on "cpu", "mps" or "cuda"; leaves no memory behind."""
    import torch

    module = {"cuda": torch.cuda, "mps": torch.mps}.get(device)

    def product(size: int) -> Callable[[], None]:
        row = torch.linspace(-1.0, 1.0, size, device=device)  # zeros would cost some chips less
        a = torch.outer(row.sin(), row.cos()).to(getattr(torch, dtype))

        def run() -> None:
            torch.matmul(a, a)
            if module:
                module.synchronize()

        return run

    peak = highest_flops(product, SECONDS)
    if module:
        module.empty_cache()
    return peak


def mlx_peak_flops(dtype: str) -> float:
    """Measure MLX on its default device; leaves no memory behind."""
    import mlx.core as mx

    def product(size: int) -> Callable[[], None]:
        row = mx.linspace(-1.0, 1.0, size)
        a = mx.outer(mx.sin(row), mx.cos(row)).astype(getattr(mx, dtype))
        mx.eval(a)
        return lambda: mx.eval(mx.matmul(a, a))

    peak = highest_flops(product, SECONDS)
    mx.clear_cache()
    return peak


def highest_flops(product: Product, seconds: float) -> float:
    """Return the highest FLOP/s of square matrix products.

    `product(size)` makes the operands and returns a function that computes one product and waits
    for it. Sizes double as long as the next one, at 8 times the arithmetic of the one before, fits
    into what is left of `seconds`; what is left then goes into repeating the fastest. The first
    product of a size is a warm-up, and the best counts, so that another process disturbs little.
    """
    deadline = time.perf_counter() + seconds
    best, fastest, fastest_size = 0.0, None, 0
    for size in SIZES:
        run = product(size)
        shortest = min([_seconds_of(run) for _ in range(1 + TIMINGS)][1:])
        if 2.0 * size**3 / shortest > best:
            best, fastest, fastest_size = 2.0 * size**3 / shortest, run, size
        if time.perf_counter() + 8 * (1 + TIMINGS) * shortest > deadline:
            break
    while time.perf_counter() < deadline:
        best = max(best, 2.0 * fastest_size**3 / _seconds_of(fastest))
    return best


def _seconds_of(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
