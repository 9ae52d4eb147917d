"""From the config dictionary to the plain values that rules work with."""

from typing import NamedTuple

from rules.contract import ConfigError, check, in_key_order, nearest, with_defaults

QUANTIZED_NAME = "{model}-{bits}bit"
LIMITS = ("checkpoint_seconds", "timeout_seconds")
ENGINE_DEVICES = {"torch": ["auto", "mps", "cuda", "cpu"], "mlx": ["auto", "metal", "cuda", "cpu"]}


class Run(NamedTuple):
    """One line of the grid with every setting it uses, and nothing that it does not use.

    `limits` are the training keys on which no result depends.
    """

    backend: str
    engine: str
    model: str
    weights: str  # folder under models/: the model itself or its quantized form
    tokenizer: str
    context: int
    variant: str
    settings: dict
    limits: dict

    @property
    def folder(self) -> str:
        return "/".join(self.labels.values())

    @property
    def labels(self) -> dict[str, str]:
        """What tells a run from the others, in the order of its folder's parts."""
        return {
            "backend": self.backend,
            "model": self.model,
            "context": str(self.context),
            "variant": self.variant,
        }


class Study(NamedTuple):
    """A checked config with all defaults filled in."""

    name: str
    sessions: dict
    split: dict
    examples: dict
    memory: dict
    models: dict[str, dict]
    tokenizers: dict[str, str]  # tokenizer name -> model whose folder provides it
    runs: list[Run]

    def run(self, folder: str) -> Run:
        """The run that writes to this folder; raises KeyError for one that is not in the grid."""
        for run in self.runs:
            if run.folder == folder:
                return run
        raise KeyError(f"no run of the study writes to {folder}")


def load_study(config: dict, schema: dict) -> Study:
    """Check a config against its schema and across its keys, and resolve every run of the grid.

    Raises ConfigError with one line that names the key, what is allowed and the nearest valid name.
    """
    config = check(config, schema)
    training = with_defaults(schema, schema["$defs"]["training"], config["training"])
    models = {
        name: with_defaults(schema, schema["$defs"]["model"], model)
        for name, model in config["models"].items()
    }
    for name in models:
        if name.rpartition("-")[2].removesuffix("bit").isdigit() and name.endswith("bit"):
            raise ConfigError(
                f"models.{name}: names that end in '-4bit' or the like are kept for the quantized "
                "form that the workflow makes; choose another name"
            )
    tokenizers: dict[str, str] = {}
    for name, model in models.items():
        tokenizers.setdefault(model.setdefault("tokenizer", name), name)
        _check_shape(name, model)
    for name, backend in config["backends"].items():
        _check_backend(name, backend)
    if config["memory"]["mps_watermark"] == 0 and config["memory"]["limit_bytes"] is None:
        raise ConfigError(
            "memory.mps_watermark: 0 takes away PyTorch's own limit on a Mac's GPU, so it needs "
            "memory.limit_bytes; set both, or neither"
        )
    runs = [
        run
        for number, line in enumerate(config["runs"], start=1)
        for run in _runs_of_line(number, line, config["backends"], models, training)
    ]
    _refuse_equal_runs(runs)
    return Study(
        name=config["study"],
        sessions=config["sessions"],
        split=config["split"],
        examples=config["examples"],
        memory=config["memory"],
        models=models,
        tokenizers=tokenizers,
        runs=runs,
    )


def _runs_of_line(
    number: int, line: dict, backends: dict, models: dict, training: dict
) -> list[Run]:
    """Resolve one line of the grid into one run per seed."""
    key = f"runs[{number}]"
    for kind, known in (("backend", backends), ("model", models)):
        if line[kind] not in known:
            raise ConfigError(
                f"{key}: {kind} {line[kind]!r} is not defined under {kind}s"
                f"{nearest(line[kind], known)}; defined are: {', '.join(known)}"
            )
    backend, model = backends[line["backend"]], models[line["model"]]
    identity = {"backend", "model", "context", "variant", "seeds"}
    overrides = {name: value for name, value in line.items() if name not in identity}
    if overrides.keys() - {"seed", *LIMITS} and "variant" not in line:
        raise ConfigError(
            f"{key}: overrides {', '.join(sorted(overrides))}, so it needs a variant: a short name "
            "for the folder of its results"
        )
    if "seeds" in line and "seed" in line:
        raise ConfigError(f"{key}: has both seed and seeds; keep one of them")
    settings = _merge(training, _training_keys(backend), overrides)
    if settings["effective_batch"] % settings["micro_batch"]:
        raise ConfigError(
            f"{key}: micro_batch {settings['micro_batch']} does not divide effective_batch "
            f"{settings['effective_batch']}"
        )
    limits = {name: settings.pop(name) for name in LIMITS}
    bits = backend["bits"]
    settings |= {
        "device": backend["device"],
        "dtype": backend["dtype"],
        "bits": bits,
        "group_size": backend["group_size"] if bits else None,
    }
    weights = line["model"]
    if bits:
        weights = QUANTIZED_NAME.format(model=line["model"], bits=bits)
        weights += "" if backend["group_size"] == 64 else f"-g{backend['group_size']}"
    runs = []
    for seed in line.get("seeds", [settings["seed"]]):
        name = f"seed{seed}"
        if "variant" in line:
            name = line["variant"] + (f"-seed{seed}" if "seeds" in line else "")
        runs.append(
            Run(
                backend=line["backend"],
                engine=backend["engine"],
                model=line["model"],
                weights=weights,
                tokenizer=model["tokenizer"],
                context=line["context"],
                variant=name,
                settings=in_key_order({**settings, "seed": seed}),
                limits=limits,
            )
        )
    return runs


def _check_shape(name: str, model: dict) -> None:
    if model["source"] != "shape":
        return
    if model["hidden_size"] % model["heads"]:
        raise ConfigError(
            f"models.{name}: heads {model['heads']} does not divide hidden_size "
            f"{model['hidden_size']}"
        )
    if model["heads"] % model["kv_heads"]:
        raise ConfigError(
            f"models.{name}: kv_heads {model['kv_heads']} does not divide heads {model['heads']}"
        )
    if model.get("embedding_rows", model["vocabulary"]) < model["vocabulary"]:
        raise ConfigError(
            f"models.{name}: embedding_rows {model['embedding_rows']} is smaller than vocabulary "
            f"{model['vocabulary']}"
        )


def _check_backend(name: str, backend: dict) -> None:
    engine = backend["engine"]
    if engine == "torch" and backend["bits"]:
        raise ConfigError(
            f"backends.{name}: bits {backend['bits']} is for engine mlx; with torch the weights "
            "stay whole (leave bits out)"
        )
    if backend["device"] not in ENGINE_DEVICES[engine]:
        raise ConfigError(
            f"backends.{name}.device: {backend['device']!r} is no device of {engine}; allowed are: "
            f"{', '.join(ENGINE_DEVICES[engine])}"
        )


def _refuse_equal_runs(runs: list[Run]) -> None:
    """Refuse two runs in one folder; on a Mac, upper and lower case name the same one."""
    seen: set[str] = set()
    for run in runs:
        folder = run.folder.lower()
        if folder in seen:
            raise ConfigError(
                f"runs: two runs would write to {run.folder}; remove one of them, or give it "
                "another variant"
            )
        seen.add(folder)


def _training_keys(backend: dict) -> dict:
    return {
        key: value
        for key, value in backend.items()
        if key not in ("engine", "device", "dtype", "bits", "group_size")
    }


def _merge(*layers: dict) -> dict:
    """Later layers win key by key, inside nested mappings too."""
    merged: dict = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = _merge(merged[key], value) if both else value
    return merged
