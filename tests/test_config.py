"""The config's contract: what is refused and how that is said, defaults, and resolved runs."""

from pathlib import Path

import pytest
import yaml

from rules.contract import ConfigError
from rules.study import load_study
from rules.yaml_files import refuse_repeated_keys

ROOT = Path(__file__).parents[1]
SCHEMA = yaml.safe_load((ROOT / "schemas/config.schema.yaml").read_text("utf-8"))
BASE = """
study: s
sessions: {source: sample}
models: {tiny: {source: shape}, big: {source: hub, repo: a/b, revision: v1, tokenizer: tiny}}
backends: {torch: {engine: torch}, mlx-4bit: {engine: mlx, bits: 4}}
training: {optimizer_steps: 5, lora: {r: 8}}
runs: [{backend: torch, model: tiny, context: 256}]
"""


def load(changes=""):
    return load_study({**yaml.safe_load(BASE), **(yaml.safe_load(changes) or {})}, SCHEMA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("studdy: x", "studdy: unknown key, did you mean 'study'?; allowed are: backends, "),
        ("study: a/b", "study: found 'a/b', expected text like"),
        ("examples: null", "examples: found None, expected object"),
        ("training: {optimizer_step: 3}", "did you mean 'optimizer_steps'?; allowed are: betas"),
        ("training: {lora: {rank: 3}}", "training.lora.rank: unknown key; allowed are: alpha, r"),
        ("training: {optimizer_steps: many}", "found 'many', expected integer"),
        ("training: {micro_batch: 0}", "training.micro_batch: found 0, expected at least 1"),
        ("training: {micro_batch: 3}", "micro_batch 3 does not divide effective_batch 4"),
        ("sessions: {source: smaple}", "did you mean 'sample'?; allowed are: sample, path, hub"),
        ("sessions: {source: hub}", "sessions: the key 'repo' is missing"),
        ("models: {tiny: {source: path}}", "models.tiny: the key 'path' is missing"),
        ("models: {tiny-4bit: {source: shape}}", "kept for the quantized form"),
        ("models: {tiny: {source: shape, heads: 3}}", "heads 3 does not divide hidden_size 128"),
        ("models: {tiny: {source: shape, embedding_rows: 400}}", "smaller than vocabulary 4096"),
        ("backends: {}", "backends: has 0 entries, and needs at least 1"),
        ("backends: {torch: {engine: torch, bits: 4}}", "bits 4 is for engine mlx"),
        ("backends: {torch: {engine: torch, bits: 5}}", "allowed are: 4, 8, null"),
        ("backends: {torch: {engine: torch, device: metal}}", "allowed are: auto, mps, cuda, cpu"),
        ("memory: {limit_byte: 1}", "memory.limit_byte: unknown key, did you mean 'limit_bytes'?"),
        ("memory: {limit_bytes: 0}", "memory.limit_bytes: found 0, expected at least 1"),
        ("memory: {swap_window_seconds: null}", "swap_window_seconds: found None, expected number"),
        ("memory: {mps_watermark: 0}", "mps_watermark: 0 takes away PyTorch's own limit"),
        ("memory: {mps_watermark: 0.0}", "it needs memory.limit_bytes; set both, or neither"),
        (
            "training: {timeout_seconds: 0}",
            "training.timeout_seconds: found 0, expected more than 0",
        ),
        ("runs: []", "runs: has 0 entries, and needs at least 1"),
        ("runs: [{backend: torch, model: tiny}]", "runs[1]: the key 'context' is missing"),
        (
            "runs: [{backend: torhc, model: tiny, context: 256}]",
            "runs[1]: backend 'torhc' is not defined under backends, did you mean 'torch'?; "
            "defined are: mlx-4bit, torch",
        ),
        (
            "runs: [{backend: torch, model: tny, context: 256}]",
            "model 'tny' is not defined under models, did you mean 'tiny'?; defined are: big, tiny",
        ),
        (
            "runs: [{backend: torch, model: tiny, context: 256, learning_rat: 1}]",
            "runs[1].learning_rat: unknown key, did you mean 'learning_rate'?",
        ),
        (
            "runs: [{backend: torch, model: tiny, context: 256, optimizer_steps: 9}]",
            "runs[1]: overrides optimizer_steps, so it needs a variant",
        ),
        (
            "runs: [{backend: torch, model: tiny, context: 256, seed: 1, seeds: [2]}]",
            "both seed and seeds",
        ),
        ("training: {learning_rate: .nan}", "learning_rate: found 'nan', expected number"),
        ("training: {weight_decay: inf}", "weight_decay: found 'inf', expected number"),
        ("training: {betas: [0.9]}", "training.betas: has 1 entries, and needs at least 2"),
        ("training: {optimizer_steps: 10000000}", "expected at most 1000000"),
        ('study: "name\\n"', "Letters, digits, dot, dash"),
        (
            "runs: [{backend: torch, model: tiny, context: 256, variant: a}, "
            "{model: tiny, context: 256, backend: torch, variant: A}]",
            "runs: two runs would write to torch/tiny/256/A",
        ),
        (
            "runs: [{backend: torch, model: tiny, context: 256}, "
            "{model: tiny, context: 256, backend: torch}]",
            "runs: two runs would write to torch/tiny/256/seed0",
        ),
    ],
)
def test_refusals_are_one_line_that_names_key_and_remedy(changes, message):
    with pytest.raises(ConfigError) as refusal:
        load(changes)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_whole_floats_are_integers_where_the_schema_wants_them():
    study = load("runs: [{backend: torch, model: tiny, context: 64.0}]")
    assert study.runs[0].folder == "torch/tiny/64/seed0"


def test_a_key_given_twice_names_file_and_line(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("study: a\nbackends:\n  torch: {engine: torch}\n  torch: {engine: mlx}\n")
    with pytest.raises(ConfigError, match=r"study\.yaml, line 4: the key 'torch' is given twice"):
        refuse_repeated_keys(file)
    file.write_text("study: a\nbackends: {torch: {engine: torch}}\n")
    refuse_repeated_keys(file)


def test_missing_section_is_named():
    config = yaml.safe_load(BASE)
    del config["models"]
    with pytest.raises(ConfigError, match="config: the key 'models' is missing"):
        load_study(config, SCHEMA)


def test_run_overrides_backend_overrides_training():
    study = load(
        """
        training: {learning_rate: 0.1, weight_decay: 0.2, epsilon: 0.3, lora: {r: 8}}
        backends: {torch: {engine: torch, weight_decay: 0.02, epsilon: 0.03}}
        runs: [{backend: torch, model: tiny, context: 256, variant: v, epsilon: 0.003}]
        """
    )
    settings = study.runs[0].settings
    assert [settings[key] for key in ("learning_rate", "weight_decay", "epsilon")] == [
        0.1,
        0.02,
        0.003,
    ]
    assert settings["lora"] == {"alpha": 32, "r": 8}
    assert settings["optimizer_steps"] == 200  # the schema's default


def test_numbers_that_come_as_text_are_read_as_numbers():
    """YAML takes 1e-3 for text, and inner values of --config are always text."""
    study = load(
        """
        training: {learning_rate: 1e-3, optimizer_steps: "7", betas: ["0.8", 0.9]}
        examples: {tool_result_tokens: "null"}
        backends: {torch: {engine: mlx, bits: "4"}}
        """
    )
    settings = study.runs[0].settings
    assert settings["learning_rate"] == 0.001
    assert settings["optimizer_steps"] == 7
    assert settings["betas"] == [0.8, 0.9]
    assert study.examples["tool_result_tokens"] is None
    assert settings["bits"] == 4


def test_seeds_and_variants_name_the_folders():
    study = load(
        """
        runs:
          - {backend: torch, model: tiny, context: 256, seeds: [0, 1]}
          - {backend: torch, model: tiny, context: 256, seeds: [0, 1], variant: hot, epsilon: 1}
          - {backend: torch, model: tiny, context: 512, seed: 7}
        """
    )
    assert [run.variant for run in study.runs] == [
        "seed0",
        "seed1",
        "hot-seed0",
        "hot-seed1",
        "seed7",
    ]
    assert [run.settings["seed"] for run in study.runs] == [0, 1, 0, 1, 7]


def test_quantized_runs_stand_on_quantized_weights_and_whole_ones_know_no_group_size():
    study = load(
        """
        backends:
          torch: {engine: torch}
          mlx: {engine: mlx, bits: 4}
          fine: {engine: mlx, bits: 8, group_size: 32}
        runs:
          - {backend: torch, model: tiny, context: 256}
          - {backend: mlx, model: tiny, context: 256}
          - {backend: fine, model: big, context: 256}
        """
    )
    assert [run.weights for run in study.runs] == ["tiny", "tiny-4bit", "big-8bit-g32"]
    assert [run.settings["group_size"] for run in study.runs] == [None, 64, 32]
    assert [run.tokenizer for run in study.runs] == ["tiny", "tiny", "tiny"]
    assert study.tokenizers == {"tiny": "big"}  # keys are sorted, the first model provides it


def test_the_order_of_keys_changes_nothing():
    swapped = dict(reversed(yaml.safe_load(BASE).items()))
    assert repr(load_study(swapped, SCHEMA)) == repr(load())


def test_every_key_of_the_schema_is_described():
    def undescribed(schema, path):
        for key, part in schema.get("properties", {}).items():
            if "$ref" not in part and not part.get("description"):
                yield f"{path}.{key}"
            yield from undescribed(part, f"{path}.{key}")
            yield from undescribed(part.get("items", {}), f"{path}.{key}[]")
        for name, part in schema.get("$defs", {}).items():
            yield from undescribed(part, f"$defs.{name}")

    # The branches of allOf name keys that are described where they are defined.
    assert list(undescribed(SCHEMA, "config")) == []


@pytest.mark.parametrize("file", ["config.yaml", *sorted(ROOT.glob("studies/*.yaml"))])
def test_shipped_studies_are_valid(file):
    load_study(yaml.safe_load((ROOT / file).read_text("utf-8")), SCHEMA)


def test_limits_are_beside_the_settings_and_need_no_variant():
    study = load(
        "memory: {limit_bytes: 9000000000, mps_watermark: 0}\n"
        "runs: [{backend: torch, model: tiny, context: 256, timeout_seconds: 60}]"
    )
    assert study.memory == {
        "limit_bytes": 9_000_000_000,
        "swap_growth_bytes": 2_000_000_000,
        "swap_window_seconds": 30,
        "mps_watermark": 0,
    }
    (run,) = study.runs
    assert run.limits == {"checkpoint_seconds": 300, "timeout_seconds": 60}
    assert run.variant == "seed0"
    assert not run.limits.keys() & run.settings.keys()
