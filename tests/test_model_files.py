"""Models from a folder and from the hub (a local stand-in, the real client), and quantized ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hub_endpoint
import pytest

from workflow_scripts.fetch_model import fetch_model
from workflow_scripts.lib import folders, jsonl
from workflow_scripts.quantize_model import quantize_model


def from_hub(tmp_path, endpoint, folder, repo="someone/small", revision="main"):
    """Fetch in a process of its own, since the client reads its settings on import."""
    code = (
        "import sys; from workflow_scripts.fetch_model import fetch_model\n"
        "fetch_model(sys.argv[1], 'hub', repo=sys.argv[2], revision=sys.argv[3])"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", code, str(tmp_path / folder), repo, revision]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return process.stdout if process.returncode == 0 else process.stderr.splitlines()[-1]


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_folder_is_taken_without_pickles_and_code(model_folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name, data in files_of(model_folder).items():
        (source / name).write_bytes(data)
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "modeling.py").write_text("raise SystemExit")
    (source / "original").mkdir()
    fetch_model(tmp_path / "model", "path", path=str(source))
    taken = files_of(tmp_path / "model")
    assert set(taken) == {*files_of(model_folder), "source.json"}
    origin = jsonl.read_json(tmp_path / "model" / "source.json")
    assert (origin["source"], origin["path"]) == ("path", str(source))
    assert len(origin["sha256"]["model.safetensors"]) == 64


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": b""}, r"only pickled weights \(pytorch_model\.bin\)"),
        ({"readme.md": b""}, "no weights"),
        ({"a.safetensors": b"", "config.json": b"{}"}, "no tokenizer.json, tokenizer_config.json"),
    ],
)
def test_folders_that_are_refused(tmp_path, files, message):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        fetch_model(tmp_path / "model", "path", path=str(tmp_path))
    assert not (tmp_path / "model").exists()


def test_a_folder_with_a_missing_shard(model_folder, tmp_path):
    for name, data in files_of(model_folder).items():
        (tmp_path / name).write_bytes(data)
    index = {"weight_map": {"x": "model-00002-of-00002.safetensors"}}
    jsonl.write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(ValueError, match="names model-00002-of-00002"):
        fetch_model(tmp_path / "model", "path", path=str(tmp_path))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model.safetensors", lambda data: data[: len(data) // 2], "not a whole safetensors file"),
        ("config.json", lambda data: data[:-5], "not JSON"),
    ],
)
def test_a_damaged_file_is_refused_by_name(model_folder, tmp_path, file, damage, message):
    source = tmp_path / "source"
    shutil.copytree(model_folder, source)
    (source / file).write_bytes(damage((source / file).read_bytes()))
    with pytest.raises(ValueError, match=rf"source/{file}: {message}"):
        fetch_model(tmp_path / "model", "path", path=str(source))
    assert not (tmp_path / "model").exists()


def test_weights_of_a_folder_are_no_link_to_it(model_folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model_folder, source)
    fetch_model(tmp_path / "model", "path", path=str(source))
    before = files_of(tmp_path / "model")
    (source / "model.safetensors").write_bytes(b"other weights")
    assert files_of(tmp_path / "model") == before


def test_no_such_folder(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        fetch_model(tmp_path / "model", "path", path=str(tmp_path / "nowhere"))


def test_from_the_hub_and_then_without_a_network(model_folder, tmp_path):
    files = files_of(model_folder)
    more = {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "README.md": b"hi"}
    with hub_endpoint.serve("models", "someone/small", {**files, **more}) as (endpoint, asked):
        assert "5 files of someone/small" in from_hub(tmp_path, endpoint, "model")
        assert not any(path.endswith(name) for path in asked for name in more)
        said = from_hub(tmp_path, endpoint, "other", revision="v9")
        assert "someone/small at revision v9: no such revision" in said
        said = from_hub(tmp_path, endpoint, "other", repo="someone/else")
        assert "someone/else at revision main: no such model, or a private one" in said
    taken = files_of(tmp_path / "model")
    origin = jsonl.read_json(tmp_path / "model" / "source.json")
    assert origin["revision"] == hub_endpoint.COMMIT
    assert set(origin["sha256"]) == set(files)
    assert {**files, "source.json": taken["source.json"]} == taken

    said = from_hub(tmp_path, endpoint, "again", revision=hub_endpoint.COMMIT)
    assert "out of reach; using what the cache holds" in said
    assert files_of(tmp_path / "again") == taken
    said = from_hub(tmp_path, endpoint, "other", repo="someone/other")
    assert "the hub is out of reach" in said
    assert "take `source: path`" in said
    assert not (tmp_path / "other").exists()


def test_a_repository_with_pickles_only(tmp_path):
    files = {"pytorch_model.bin": b"pickle", "config.json": b"{}"}
    with hub_endpoint.serve("models", "someone/old", files) as (endpoint, _):
        said = from_hub(tmp_path, endpoint, "model", repo="someone/old")
    assert "only pickled weights (pytorch_model.bin)" in said


def test_quantized(model_folder, tmp_path):
    mlx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm")
    quantize_model(model_folder, tmp_path / "small-4bit", bits=4, group_size=32)
    model, _ = mlx_lm.load(str(tmp_path / "small-4bit"))
    assert model(mlx.array([[1, 2, 3]])).shape == (1, 3, 400)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "small-4bit" / name).read_bytes() == (model_folder / name).read_bytes()
    with pytest.raises(ValueError, match=r"group_size: 64 does not divide .* \(32\)"):
        quantize_model(model_folder, tmp_path / "other", bits=4, group_size=64)
    with pytest.raises(ValueError, match="quantized already"):
        quantize_model(tmp_path / "small-4bit", tmp_path / "other", bits=4, group_size=32)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "here" / "model"
    with folders.atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(FileNotFoundError), folders.atomic_folder(target) as folder:
        (folder / "b" / "c").write_text("2")
    assert [file.name for file in target.iterdir()] == ["a"]
    assert [each.name for each in target.parent.iterdir()] == ["model"]
