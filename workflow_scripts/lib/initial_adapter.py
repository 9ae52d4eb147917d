"""Where LoRA starts: its A matrices, drawn once into a file that both engines load. B is zero."""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from workflow_scripts.lib import recipe


def draw(config: Mapping, rank: int, seed: int) -> dict[str, np.ndarray]:
    """Draw A, float32 (rank, inputs), of every module of `recipe.lora_shapes(config)`."""
    shapes = recipe.lora_shapes(config)
    return {name: draw_a(seed, name, rank, inputs) for name, (inputs, _) in shapes.items()}


def draw_a(seed: int, module: str, rank: int, inputs: int) -> np.ndarray:
    """Draw the A of one module, float32 (rank, inputs), from seed, name and shape alone.

    Uniform within 1/sqrt(inputs), which is PEFT's kaiming_uniform_(a=sqrt(5)); mlx-lm's own start
    has the same bound.
    """
    key = f"{seed} {module} {rank} {inputs}".encode()
    generator = np.random.Generator(np.random.PCG64(list(hashlib.sha256(key).digest())))
    bound = 1.0 / math.sqrt(inputs)
    return (generator.random((rank, inputs), dtype=np.float32) * 2.0 - 1.0) * np.float32(bound)


def write(path: str | Path, matrices: Mapping[str, np.ndarray]) -> None:
    """Write the matrices under their modules' names; the same matrices give the same bytes."""
    from safetensors.numpy import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(dict(matrices), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | Path, config: Mapping, rank: int) -> dict[str, np.ndarray]:
    """Read the matrices that `write` wrote for a model of this config.

    Raises ValueError naming the file when it isn't whole, or holds other modules or shapes.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    again = "delete it and run the workflow again"
    try:
        matrices = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); {again}") from None
    wanted = {name: (rank, inputs) for name, (inputs, _) in recipe.lora_shapes(config).items()}
    found = {name: a.shape for name, a in matrices.items()}
    odd = sorted(name for name, _ in wanted.items() ^ found.items())
    if odd:
        raise ValueError(
            f"{path}: not the start of an adapter of rank {rank} on this model: {odd[0]} has "
            f"the shape {found.get(odd[0])}, expected {wanted.get(odd[0])}; {again}"
        )
    return matrices
