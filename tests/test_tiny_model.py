"""Models made here: both engines load them, and the same arguments give the same bytes."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from workflow_scripts.lib import jsonl, tiny_model
from workflow_scripts.make_model import make_model

TEXT = "What does the test in tests/test_add.py say?\n    assert add(1, 2) == 3\n" * 5


def hashes(folder: Path) -> dict:
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.fixture
def corpus(tmp_path):
    call = {"id": "1", "name": "bash", "arguments": {"command": "ls é"}}
    turns = [
        {"role": "user", "text": TEXT},
        {"role": "assistant", "text": "", "calls": [call], "supervised": True},
    ]
    jsonl.write_jsonl(tmp_path / "train.jsonl", [{"turns": turns}])
    return tmp_path / "train.jsonl"


def test_both_engines_load_it_and_agree(model_folder):
    torch = pytest.importorskip("torch")
    mlx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder))
    model, loading = AutoModelForCausalLM.from_pretrained(
        str(model_folder), dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXT}], tokenize=True, return_dict=False
    )
    ours = model(torch.tensor([ids])).logits[0].detach().numpy()
    same, wrapped = mlx_lm.load(str(model_folder))
    theirs = np.array(same(mlx.array([ids]))[0])
    assert np.abs(ours - theirs).max() < 1e-4
    assert ours.std() > 0.1
    assert wrapped.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens(tokenizer.pad_token_id) == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_same_arguments_same_bytes_in_another_process(corpus, tmp_path):
    make_model(tmp_path / "one", corpus, vocabulary=300, hidden_size=32, heads=2, seed=3)
    program = (
        "import sys; from workflow_scripts.make_model import make_model;"
        "make_model(sys.argv[1], sys.argv[2], vocabulary=300, hidden_size=32, heads=2, seed=3)"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "two"), str(corpus)],
        check=True,
        cwd=Path(__file__).parents[1],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ".", "RAYON_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    make_model(tmp_path / "three", corpus, vocabulary=300, hidden_size=32, heads=2, seed=4)
    changed = {
        name
        for name, value in hashes(tmp_path / "three").items()
        if value != hashes(tmp_path / "one")[name]
    }
    assert changed == {"model.safetensors"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_number_formats(corpus, tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    make_model(tmp_path / "whole", corpus, vocabulary=300, hidden_size=32, heads=2)
    make_model(tmp_path / "given", corpus, vocabulary=300, hidden_size=32, heads=2, dtype=dtype)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "given" / "model.safetensors").items():
        assert torch.equal(tensor, whole[name].to(getattr(torch, dtype))), name
    config = json.loads((tmp_path / "given" / "config.json").read_text())
    assert config["dtype"] == dtype


def test_numbers_do_not_depend_on_how_many_are_drawn_at_a_time(corpus, tmp_path, monkeypatch):
    make_model(tmp_path / "one", corpus, vocabulary=300, hidden_size=32, heads=2)
    monkeypatch.setattr(tiny_model, "NUMBERS_AT_A_TIME", 1000)
    make_model(tmp_path / "two", corpus, vocabulary=300, hidden_size=32, heads=2)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


def test_embedding_higher_than_the_vocabulary_and_untied(corpus, tmp_path):
    make_model(
        tmp_path / "one", corpus, vocabulary=300, embedding_rows=512, hidden_size=32, heads=2
    )
    assert jsonl.read_json(tmp_path / "one" / "config.json")["vocab_size"] == 512
    names = [
        name
        for name, _, _ in tiny_model._tensors(
            {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_hidden_layers": 1,
                "vocab_size": 9,
                "tie_word_embeddings": False,
            },
            0.1,
        )
    ]
    assert names[-1] == "lm_head.weight"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"vocabulary": 200}, "vocabulary: 200 is below 261"),
        ({"hidden_size": 36, "heads": 8}, "hidden_size: 36 must be a multiple"),
        ({"heads": 4, "kv_heads": 3}, r"heads: 4 must be a multiple of kv_heads \(3\)"),
        ({"dtype": "int8"}, "dtype: 'int8'"),
        ({"embedding_rows": 100}, "embedding_rows: 100 is below the vocabulary"),
    ],
)
def test_shapes_that_do_not_work(corpus, tmp_path, shape, message):
    with pytest.raises(ValueError, match=message):
        make_model(tmp_path / "model", corpus, **{"vocabulary": 300, "hidden_size": 32, **shape})
    assert not (tmp_path / "model").exists()


def test_an_empty_corpus(tmp_path):
    jsonl.write_jsonl(tmp_path / "train.jsonl", [])
    with pytest.raises(ValueError, match=r"train\.jsonl: no text"):
        make_model(tmp_path / "model", tmp_path / "train.jsonl")
