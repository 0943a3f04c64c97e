"""A library that a different user has put where `--arch` looks for its own is not loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.private_folders import WAYS, Opened
from tpcompile.fusion import no_gpu

CONSTRUCTOR = '#include <stdio.h>\n__attribute__((constructor)) void runs(void) { fclose(fopen("%s", "w")); }\n'
LOADS = "from tpcompile.fusion.no_gpu import pretend; pretend('sm_90')"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A library whose constructor makes a file: code that would run in the process that loads it."""
    source, library = tmp_path / "planted.c", tmp_path / "planted.so"
    source.write_text(CONSTRUCTOR % (tmp_path / "it_ran"))
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def loads(folder: Path) -> str:
    """Error of a process that has no compiler, and so can only load what is there."""
    environ = {"PATH": "", "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", LOADS]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False).stderr


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where the library is looked for, and where it was before: in the temporary folder itself."""
    for name in ("tmp", "cache"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = no_gpu._library(no_gpu._torch_folder())
    assert tmp_path in library.parents
    return [library, tmp_path / "tmp" / f"tpcompile_no_gpu_{library.stem[-16:]}.so"]


def test_a_library_of_this_user_is_loaded(places: list[Path], planted: Path, tmp_path: Path) -> None:
    """The control: what is planted would run."""
    planted.rename(places[0])
    assert "use_no_gpu" in loads(tmp_path)
    assert (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("opened", WAYS)
def test_a_library_in_a_folder_that_others_can_write_to_is_not_loaded(
    opened: Opened, places: list[Path], planted: Path, tmp_path: Path
) -> None:
    planted.rename(places[0])
    opened(places[0].parents[1], tmp_path)
    assert "needs g++" in loads(tmp_path)
    assert not (tmp_path / "it_ran").exists()


def test_a_library_in_the_temporary_folder_is_not_loaded(places: list[Path], planted: Path, tmp_path: Path) -> None:
    planted.rename(places[1])
    assert "needs g++" in loads(tmp_path)
    assert not (tmp_path / "it_ran").exists()
