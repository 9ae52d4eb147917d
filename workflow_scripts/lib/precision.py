"""Which device and floating-point type a run takes, and how float16 gradients are kept alive."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# What may run where, the first being preferred by `auto`. float16 on PyTorch's CPU and 16 bit on
# MLX's CPU build work but are several times slower than float32 there.
TORCH_DTYPES = {
    "cpu": ("float32", "bfloat16"),
    "mps": ("bfloat16", "float16", "float32"),
    "cuda": ("bfloat16", "float16", "float32"),
}
MLX_DTYPES = {
    "cpu": ("float32", "bfloat16", "float16"),
    "metal": ("bfloat16", "float16", "float32"),
    "cuda": ("bfloat16", "float16", "float32"),
}
BITS = (4, 8)


class UnavailableError(ValueError):
    """The device that a run asks for is not on this machine."""


class Precision(NamedTuple):
    """Where a run computes and in which floating-point type its frozen weights lie."""

    device: str
    dtype: str


def resolve_torch(
    device: str, dtype: str, *, mps: bool, cuda: bool, bfloat16: bool = True
) -> Precision:
    """Resolve `auto` for PyTorch: device mps, cuda or cpu; dtype by the table of this module.

    `mps` and `cuda` say what torch finds here, `bfloat16` what a probe on that device found (asked
    only of mps and cuda). Raises UnavailableError for a device that is not here, ValueError for a
    type that the device isn't allowed.
    """
    here = [name for name, found in (("mps", mps), ("cuda", cuda), ("cpu", True)) if found]
    return _resolve("torch", TORCH_DTYPES, here, device, dtype, bfloat16)


def resolve_mlx(
    device: str, dtype: str, *, metal: bool, cuda: bool, bits: int | None = None
) -> Precision:
    """Resolve `auto` for MLX: device metal, cuda or cpu. With `bits` (4 or 8: quantized frozen
    weights) the dtype is that of the activations and of the scales.
    """
    if bits is not None and bits not in BITS:
        raise ValueError(f"backends.*.bits: {bits} is not supported; allowed are 4, 8 or none")
    here = [name for name, found in (("metal", metal), ("cuda", cuda), ("cpu", True)) if found]
    return _resolve("mlx", MLX_DTYPES, here, device, dtype, bfloat16=True)


def _resolve(
    engine: str, table: Mapping, here: Iterable[str], device: str, dtype: str, bfloat16: bool
) -> Precision:
    here = list(here)
    if device == "auto":
        device = here[0]
    if device not in table:
        raise ValueError(f"device: {device!r} is unknown to {engine}; use {', '.join(table)}, auto")
    if device not in here:
        raise UnavailableError(f"{engine} finds no {device} here, only {', '.join(here)}")
    usable = [name for name in table[device] if bfloat16 or name != "bfloat16"]
    if dtype == "auto":
        return Precision(device, usable[0])
    if dtype not in usable:
        raise ValueError(
            f"dtype: {dtype!r} is not allowed for {engine} on {device}; "
            f"use {', '.join(usable)}, auto"
        )
    return Precision(device, dtype)


@dataclass
class LossScale:
    """Scale of the loss that keeps float16 gradients from vanishing; other types need none (1).

    Starts near the number of supervised tokens of a step, so that a token's gradient is about as
    large as it is alone; halves where a gradient overflows, that step being skipped; doubles after
    `patience` clean steps. Powers of two, so that scaling is exact. The adapters are float32.
    """

    value: float = 1.0
    patience: int = 100
    clean: int = 0

    @classmethod
    def for_dtype(cls, dtype: str) -> "LossScale":
        return cls(value=1024.0 if dtype == "float16" else 1.0)

    def skips(self, finite: bool) -> bool:
        """Take note of one step's gradient; True when the step is to be skipped and tried lower.

        A gradient that isn't finite without any scaling left is the caller's to report.
        """
        if not finite and self.value > 1.0:
            self.value /= 2.0
            self.clean = 0
            return True
        if self.value > 1.0:
            self.clean += 1
            if self.clean >= self.patience:
                self.value, self.clean = min(self.value * 2.0, 65536.0), 0
        return False

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return what `restore` takes, for a checkpoint."""
        return {"value": np.array(self.value), "clean": np.array(self.clean)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from a checkpoint."""
        self.value, self.clean = float(arrays["value"]), int(arrays["clean"])
