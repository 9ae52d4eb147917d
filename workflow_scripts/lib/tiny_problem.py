"""A tiny Qwen 2 model, rows to learn from, and the settings of a run over them.

What the engines are compared on: small enough that both solve it in seconds on any CPU.
"""

import json
from pathlib import Path

import numpy as np

from workflow_scripts.lib import initial_adapter, measure, tiny_model
from workflow_scripts.lib.batches import IGNORED

VOCABULARY = 320
CONTEXT = 128


def make_model(folder: Path, **shape) -> Path:
    """Write a float32 model of about 0.1 million parameters with its tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = tiny_model.train_tokenizer(["read edit run test fix the file " * 20], VOCABULARY)
    tiny_model.write_tokenizer(folder, tokenizer, 4096)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "embedding_std": 0.2, **shape}
    tiny_model.write_weights(folder, 1, 0, vocab_size=VOCABULARY, **sizes)
    return folder


def make_rows(count: int, seed: int = 0) -> list[dict]:
    """Rows of several supervised spans, unequal lengths and unequal numbers of supervised tokens.

    Text repeats itself, so that there is something to learn.
    """
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(random.integers(12, CONTEXT + 1)) if number else CONTEXT
        ids = (np.arange(length) * 3 + random.integers(4)) % 40 + 5
        supervised = np.zeros(length, dtype=bool)
        for _ in range(int(random.integers(1, 4))):
            start = int(random.integers(1, length - 2))
            supervised[start : start + int(random.integers(1, 30))] = True
        rows.append(
            {
                "input_ids": ids.tolist(),
                "labels": np.where(supervised, ids, IGNORED).tolist(),
                "session": "s",
                "first_turn": 0,
                "last_turn": 1,
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(folder: Path, model: Path, engine: str, name: str = "run", **changes) -> dict:
    """Return all settings of one run; rows are written to `folder` when they aren't there."""
    for split, count, seed in (("train", 24, 0), ("val", 7, 1)):
        if not (folder / f"{split}.jsonl").exists():
            write_rows(folder / f"{split}.jsonl", make_rows(count, seed))
    adapter = folder / f"{model.name}-start.safetensors"
    initial_adapter.write(adapter, start(model))
    train_file, val_file = folder / "train.jsonl", folder / "val.jsonl"
    return {
        "study": "parity",
        "backend": engine,
        "engine": engine,
        "model": "tiny",
        "context": CONTEXT,
        "variant": "seed0",
        "model_folder": str(model),
        "train_file": str(train_file),
        "val_file": str(val_file),
        "initial_adapter": str(adapter),
        "state_folder": str(folder / f"{engine}-{name}"),
        "device": "cpu",
        "dtype": "auto",
        "bits": None,
        "group_size": None,
        "recipe": "matched",
        "loop": "ours",
        "optimizer_steps": 3,
        "effective_batch": 4,
        "micro_batch": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.01,
        "betas": [0.9, 0.999],
        "epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "lora": {"r": 8, "alpha": 16},
        "seed": 0,
        "gradient_checkpointing": False,
        "head_chunk": 32,
        "fingerprints": measure.fingerprints(model, adapter, train_file, val_file),
        "identity": {},
        "checkpoint_seconds": None,
        "resume": None,
        **changes,
    }


def model_config(model: Path) -> dict:
    return json.loads((model / "config.json").read_text())


def start(model: Path, rank: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    """Where the adapters of a model start: the A matrices."""
    return initial_adapter.draw(model_config(model), rank, seed)


def steps_of(run: dict) -> list[dict]:
    """Return the lines of a run's steps.jsonl."""
    lines = (Path(run["state_folder"]) / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def quantize(model: Path, folder: Path, bits: int = 4) -> Path:
    """Write `model` in mlx-lm's quantized format."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model, quantize_model

    network, config = load_model(model)
    network, config = quantize_model(network, config, group_size=64, bits=bits)
    folder.mkdir(parents=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(network.parameters())),
        metadata={"format": "mlx"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def dequantize(model: Path, folder: Path, original: Path) -> Path:
    """Write the weights that a quantized model stands for as an ordinary float32 folder."""
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    network, _ = load_model(model)
    weights = dict(tree_flatten(network.parameters()))
    for name, module in network.named_modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            weights[f"{name}.weight"] = mx.dequantize(
                module.weight, module.scales, module.biases, module.group_size, module.bits
            ).astype(mx.float32)
            del weights[f"{name}.scales"], weights[f"{name}.biases"]
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((original / name).read_bytes())
    return folder
