from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from tpcompile.torch_api.tested_versions import TESTED, untested, warn_if_untested

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.13.0+cu130", "2.13.1", torch.__version__])
def test_tested_versions_and_their_patch_releases_are_not_warned_of(version: str) -> None:
    assert untested(version) == ""


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0", "2.14.0a0+gitabc", "3.0.0"])
def test_an_unknown_minor_version_is_warned_of_with_what_was_tested(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match=rf"{version[:4]}.*2\.11 to 2\.13"):
        warn_if_untested(version)


def test_only_rank_0_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("2.14.0")


def test_the_warning_is_one_line_and_comes_once() -> None:
    module = PROJECT / "tpcompile" / "torch_api" / "tested_versions.py"
    code = f"import runpy; warn = runpy.run_path({str(module)!r})['warn_if_untested']; warn('2.14.0'); warn('2.14.0')"
    done = subprocess.run([sys.executable, "-c", code], env={"RANK": "0"}, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert "2.14.0" in line


def test_the_package_takes_newer_versions_than_were_tested_and_the_scripts_pin_one() -> None:
    from packaging.requirements import Requirement

    wanted = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    (of_torch,) = [one for one in wanted if one.startswith("torch")]
    allowed = Requirement(of_torch).specifier
    assert all(f"{TESTED[-1]}.{patch}" in allowed for patch in (0, 1, 9)) and f"{TESTED[0]}.0" in allowed
    assert "2.14.0" in allowed and "2.10.0" not in allowed
    script = (PROJECT / "scripts" / "venv.sh").read_text()
    assert 'DEFAULT_TORCH="torch==2.13.0"\n' in script
    minor = int(TESTED[-1].partition(".")[2])
    assert f'TORCH_RANGE="torch>={TESTED[0]},<2.{minor + 1}"\n' in script
