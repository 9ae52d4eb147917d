"""Which source files a rule depends on."""

import re
from pathlib import Path

import pytest
import yaml

from rules.sources import sources_of

ROOT = Path(__file__).parents[1]


def test_follows_imports_of_the_package_and_data_files_beside_them(tmp_path):
    lib = tmp_path / "workflow_scripts/lib"
    lib.mkdir(parents=True)
    (lib.parent / "do.py").write_text(
        "import json\nfrom workflow_scripts.lib import a\n\ndef f():\n"
        "    from workflow_scripts.lib.b import x\n"
    )
    (lib / "a.py").write_text("import workflow_scripts.lib.c\nNAMES = 'words.txt', 'no.txt'\n")
    (lib / "b.py").write_text("from workflow_scripts.lib import a\nx = 1\n")
    (lib / "c.py").write_text("")
    (lib / "d.py").write_text("")
    (lib / "words.txt").write_text("")
    assert sources_of(str(tmp_path), "workflow_scripts/do.py") == (
        "workflow_scripts/do.py",
        "workflow_scripts/lib/a.py",
        "workflow_scripts/lib/b.py",
        "workflow_scripts/lib/c.py",
        "workflow_scripts/lib/words.txt",
    )


def test_missing_script_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        sources_of(str(tmp_path), "workflow_scripts/none.py")


def test_each_trainer_depends_on_its_own_engine_alone():
    torch = sources_of(
        str(ROOT), "workflow_scripts/train_torch.py", "workflow_scripts/lib/torch_lora.py"
    )
    mlx = sources_of(str(ROOT), "workflow_scripts/train_mlx.py", "workflow_scripts/lib/mlx_lora.py")
    assert "workflow_scripts/lib/torch_lora.py" in set(torch) - set(mlx)
    assert "workflow_scripts/lib/mlx_lora.py" in set(mlx) - set(torch)
    assert {"workflow_scripts/lib/guard.py", "workflow_scripts/lib/recipe.py"} <= set(torch) & set(
        mlx
    )


def test_sessions_do_not_depend_on_masking():
    sources = sources_of(str(ROOT), "workflow_scripts/read_sessions.py")
    assert not any("masking" in source or "windows" in source for source in sources)


def test_conda_environments_pin_what_the_tests_ran_with():
    lines = (ROOT / "envs/constraints.txt").read_text().splitlines()
    pins = {
        normal(name): version
        for name, version in (line.split("==") for line in lines if "==" in line)
    }
    for file in sorted((ROOT / "envs").glob("*.yaml")):
        packages = yaml.safe_load(file.read_text())["dependencies"][-1]["pip"]
        for package in packages:
            name, _, version = package.partition("==")
            assert pins[normal(name)] == version, f"{file.name}: {package}"


def normal(name):
    return re.sub(r"[-_]", "-", name.partition("[")[0]).lower()
