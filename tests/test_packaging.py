"""tpcompile-reader, the distribution without torch: its metadata, and what works where torch is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import tpcompile

ROOT = Path(__file__).resolve().parents[1]
READER = ROOT / "packaging" / "reader"
JOBS = ROOT / "tests" / "data" / "jobs" / "torch-2.13.0"
FOR_TORCH = {"torch", "triton", "numpy"}
_MODULES = {"pyyaml": "yaml"}
"""Requirement -> its module, where they have different names."""


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def requirements(folder: Path) -> set[str]:
    return set(project(folder)["project"]["dependencies"])


def name_of(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def test_the_reader_needs_what_tpcompile_needs_without_torch() -> None:
    needed = {one for one in requirements(ROOT) if name_of(one) not in FOR_TORCH}
    assert requirements(READER) == needed
    assert {name_of(one) for one in requirements(ROOT)} >= FOR_TORCH


def test_both_have_one_version_one_command_and_the_same_folders() -> None:
    ours, reader = project(ROOT), project(READER)
    assert ours["project"]["scripts"] == reader["project"]["scripts"]
    versions = [
        (folder / one["tool"]["hatch"]["version"]["path"]).resolve() for folder, one in ((ROOT, ours), (READER, reader))
    ]
    assert versions[0] == versions[1]
    wheel = ours["tool"]["hatch"]["build"]["targets"]["wheel"]
    moved = {
        folder.strip("/"): wheel["sources"].get(folder.strip("/"), folder.strip("/")) for folder in wheel["include"]
    }
    forced = reader["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {(READER / source).resolve(): target for source, target in forced.items()} == {
        ROOT / source: target for source, target in moved.items()
    }


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is installed here, in one folder or several, except torch and triton."""
    folder = tmp_path_factory.mktemp("site")
    modules = [import_module(_MODULES.get(name, name)) for name in map(name_of, requirements(READER))]
    for site in dict.fromkeys(Path(str(module.__file__)).parents[1] for module in modules):
        for installed in site.iterdir():
            is_for_torch = installed.name.startswith((*FOR_TORCH, "functorch"))
            here = folder / installed.name
            if not is_for_torch and installed.suffix != ".pth" and not here.exists():
                here.symlink_to(installed)
    (folder / "tpcompile").symlink_to(ROOT / "tpcompile")
    return folder


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", *map(str, arguments)]
    return subprocess.run(
        command, env=environ | {"PYTHONPATH": str(folder)}, cwd=folder, capture_output=True, text=True, check=False
    )


def test_there_is_no_torch_in_that_environment(without_torch: Path) -> None:
    assert re.search("ModuleNotFoundError: .*'torch'", run(without_torch, "-c", "import torch").stderr)


@pytest.mark.parametrize(("job", "code"), [("training", 0), ("order", 1)])
def test_logs_are_diagnosed_without_torch(job: str, code: int, without_torch: Path) -> None:
    done = run(without_torch, "-m", "tpcompile", "diagnose", JOBS / job, "--json", "-")
    assert done.returncode == code, done.stderr
    assert tpcompile.Verdict.model_validate_json(done.stdout).exit_code == code


@pytest.mark.parametrize("command", ["gate", "bench", "certify", "dryrun", "fusion", "typecheck", "verify-win"])
def test_a_command_that_needs_torch_says_so_in_one_line(command: str, without_torch: Path) -> None:
    done = run(without_torch, "-m", "tpcompile", command)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "torch" in line
