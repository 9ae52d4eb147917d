"""The snapshot: from paths, the sample folder, and a dataset of a stand-in hub."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import hub_endpoint
import pytest

from workflow_scripts.lib import jsonl, session_sources
from workflow_scripts.snapshot_sessions import snapshot_sessions

ROOT = Path(__file__).resolve().parents[1]


def snapshot(tmp_path, source="path", **options):
    snapshot_sessions(source, tmp_path / "raw", tmp_path / "manifest.json", **options)
    manifest = jsonl.read_json(tmp_path / "manifest.json")
    for file in manifest["files"]:
        data = (tmp_path / "raw" / file["file"]).read_bytes()
        assert file["bytes"] == len(data)
        assert file["sha256"] == hashlib.sha256(data).hexdigest()
    return manifest


def names(manifest):
    return [file["file"] for file in manifest["files"]]


@pytest.fixture
def sessions(tmp_path):
    folder = tmp_path / "sessions"
    for name in ("b.jsonl", "sub dir/a.jsonl", "sub dir/notes.txt", ".hidden/c.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    return folder


def test_folder_gives_its_jsonl_files_under_relative_names(tmp_path, sessions):
    manifest = snapshot(tmp_path, paths=str(sessions))
    assert names(manifest) == [".hidden/c.jsonl", "b.jsonl", "sub dir/a.jsonl"]
    assert manifest["skipped"] == []
    assert manifest["source"] == "path"


def test_files_globs_and_home(tmp_path, sessions, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(snapshot(tmp_path, paths=["~/sessions/b.jsonl"])) == ["b.jsonl"]
    assert names(snapshot(tmp_path, paths=["~/sessions/**/*.jsonl"])) == [
        "a.jsonl",
        "b.jsonl",
        "c.jsonl",
    ]


def test_a_second_snapshot_replaces_the_first(tmp_path, sessions):
    snapshot(tmp_path, paths=[str(sessions)])
    (sessions / "b.jsonl").unlink()
    snapshot(tmp_path, paths=[str(sessions)])
    assert not (tmp_path / "raw/b.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "raw", "sessions"]


def test_names_that_collide_get_numbers(tmp_path):
    for place, name in (("x/s", "a.jsonl"), ("y/s", "a.jsonl"), ("y/s", "b.jsonl")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_text(place)
    folders = [str(tmp_path / "x/s"), str(tmp_path / "y/s"), str(tmp_path / "x/s")]
    manifest = snapshot(tmp_path, paths=folders)
    assert names(manifest) == ["s/a-2.jsonl", "s/a.jsonl", "s/b.jsonl"]


def test_names_that_a_mac_takes_for_one_get_numbers(tmp_path):
    taken = set()
    names = ["a.jsonl", "A.jsonl", "\u00e9.jsonl", "e\u0301.jsonl"]
    free = [session_sources._free(name, taken) for name in names]
    assert free == ["a.jsonl", "A-2.jsonl", "\u00e9.jsonl", "e\u0301-2.jsonl"]


def test_linked_folders_are_read_once_and_a_circle_of_links_ends(tmp_path, sessions):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "d.jsonl").write_text("d")
    (elsewhere / "back").symlink_to(sessions)
    (sessions / "linked").symlink_to(elsewhere)
    (sessions / "linked too").symlink_to(elsewhere)
    manifest = snapshot(tmp_path, paths=str(sessions))
    assert names(manifest) == [
        ".hidden/c.jsonl",
        "b.jsonl",
        "linked/d.jsonl",
        "sub dir/a.jsonl",
    ]


def test_a_folder_that_cannot_be_read_is_skipped_with_a_reason(tmp_path, sessions, monkeypatch):
    real = os.scandir

    def scandir(path):
        if os.path.basename(path) == "sub dir":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    manifest = snapshot(tmp_path, paths=str(sessions))
    assert manifest["skipped"] == [
        {
            "file": "sessions/sub dir",
            "reason": "a folder that can't be read: Permission denied",
        }
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems refuse such names")
def test_names_that_are_no_utf8(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text("x")
    assert names(snapshot(tmp_path, paths=str(folder))) == ["caf%E9.jsonl"]


def test_unreadable_files_are_skipped_with_a_reason(tmp_path, sessions):
    os.symlink(tmp_path / "nowhere", sessions / "broken.jsonl")
    manifest = snapshot(tmp_path, paths=str(sessions))
    reason = "not a file, or a link to nowhere"
    assert manifest["skipped"] == [{"file": "broken.jsonl", "reason": reason}]


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        (["{}/gone"], "there is no .*/gone"),
        (["{}/*.jsonl"], "no file matches"),
        (["{}"], "no .jsonl file in"),
        ([], "an empty list"),
    ],
)
def test_nothing_found_is_a_clear_error(tmp_path, paths, error):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=error):
        snapshot(tmp_path, paths=[path.format(tmp_path / "empty") for path in paths])
    assert not (tmp_path / "raw").exists()


def test_unknown_source(tmp_path):
    with pytest.raises(ValueError, match="expected 'sample', 'path' or 'hub'"):
        snapshot(tmp_path, source="ftp")


def test_sample(tmp_path, sessions):
    assert len(names(snapshot(tmp_path, "sample", sample_folder=sessions))) == 3


HUB_FILES = {
    "a.jsonl": b'{"type":"session"}\n',
    "sub/b.jsonl": b'{"type":"session"}\n\n',
    "README.md": b"no session",
}


def from_hub(tmp_path, endpoint, revision=hub_endpoint.COMMIT, repo="someone/sessions"):
    """Run the snapshot in a process of its own, since the client reads its settings on import."""
    code = (
        "from workflow_scripts.snapshot_sessions import snapshot_sessions\n"
        f"snapshot_sessions('hub', r'{tmp_path}/raw', r'{tmp_path}/manifest.json',"
        f" repo={repo!r}, revision={revision!r})"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def last_line(process):
    return process.stderr.strip().splitlines()[-1]


def test_hub_then_the_cache_when_it_is_out_of_reach(tmp_path):
    with hub_endpoint.serve("datasets", "someone/sessions", HUB_FILES) as (endpoint, asked):
        process = from_hub(tmp_path, endpoint)
        assert process.returncode == 0, process.stderr
        assert not any(path.endswith("README.md") for path in asked)
    manifest = jsonl.read_json(tmp_path / "manifest.json")
    assert names(manifest) == ["a.jsonl", "sub/b.jsonl"]
    assert manifest["commit"] == hub_endpoint.COMMIT
    assert (tmp_path / "raw/sub/b.jsonl").read_bytes() == HUB_FILES["sub/b.jsonl"]

    process = from_hub(tmp_path, endpoint)
    assert process.returncode == 0, process.stderr
    assert "out of reach; using what the cache holds" in process.stdout
    assert jsonl.read_json(tmp_path / "manifest.json") == manifest


def test_hub_errors_are_one_clear_line(tmp_path):
    with hub_endpoint.serve("datasets", "someone/sessions", HUB_FILES) as (endpoint, _):
        process = from_hub(tmp_path, endpoint, revision="0" * 40)
        assert "no such revision" in last_line(process)
        process = from_hub(tmp_path, endpoint, repo="someone/else")
        assert "dataset someone/else" in last_line(process)
        assert "no such dataset" in last_line(process)
    process = from_hub(tmp_path, endpoint)
    assert "the hub is out of reach" in last_line(process)
    assert "sessions.source: path" in last_line(process)


def test_hub_needs_repository_and_revision(tmp_path):
    with pytest.raises(ValueError, match=r"sessions\.repo .* sessions\.revision"):
        snapshot(tmp_path, "hub", repo="someone/sessions")


def test_secrets_never_reach_the_results(tmp_path):
    """Not even where a block of reading ends inside of one."""
    key = "AKIA" + "Z7QK3M5XW2JD8RBN"
    lines = [b'{"text": "' + b"x " * 4500 + key.encode() + b'"}\n'] * 400
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions/a.jsonl").write_bytes(b"".join(lines) + b'{"text": "' + key.encode())
    manifest = snapshot(tmp_path, paths=str(tmp_path / "sessions"))
    assert manifest["files"][0]["redacted"] == {"aws-key": 401}
    copied = (tmp_path / "raw/a.jsonl").read_bytes()
    assert key.encode() not in copied
    assert copied.count(b"\n") == 400
    assert copied.endswith(b'{"text": "[REDACTED:aws-key]')


def test_secrets_in_the_names_of_files_and_folders_stay_outside(tmp_path):
    name = "gh" + "p_Z7QK3M5XW2JD8RBNz7qk3m5xw2jd8rbn4tYu"
    folder = tmp_path / "sessions" / name
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("{}")
    manifest = snapshot(tmp_path, paths=str(tmp_path / "sessions"))
    assert names(manifest) == ["[REDACTED:github-token]/a.jsonl"]
    assert not list((tmp_path / "raw").rglob(f"*{name}*"))


def test_secrets_stay_when_asked_to(tmp_path):
    text = b'{"password": "q8Zr2Kx9Lw4Tn7Vb"}\n'
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions/a.jsonl").write_bytes(text)
    manifest = snapshot(tmp_path, paths=str(tmp_path / "sessions"), redact=False)
    assert "redacted" not in manifest["files"][0]
    assert (tmp_path / "raw/a.jsonl").read_bytes() == text
