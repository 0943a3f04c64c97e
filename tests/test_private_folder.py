"""Folders of this user alone: where they are, and what is refused."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from tests.private_folders import WAYS, Opened
from tpcompile.errors import ExitCode, PreflightError
from tpcompile.private_folder import cache_folder, shared_folder

OWN = f"tpcompile-{os.geteuid()}"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home, cache and temporary folder of this test."""
    for name in ("home", "cache", "tmp"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def test_built_code_is_in_the_users_cache(place: Path) -> None:
    assert cache_folder("built") == place / "cache/tpcompile/built"


def test_what_processes_share_is_in_a_folder_of_the_user_in_the_temporary_one(place: Path) -> None:
    assert shared_folder("stacks") == place / "tmp" / OWN / "stacks"


def test_all_that_is_made_is_for_this_user_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache/not/made/yet"))
    before = os.umask(0)
    try:
        made = cache_folder("built")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (made, *made.parents[:4])]
    assert modes == [0o700] * 5


@pytest.mark.parametrize("configured", ["", "relative/path"])
def test_without_a_usable_variable_it_is_below_home(
    configured: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", configured)
    assert cache_folder("built") == place / "home/.cache/tpcompile/built"


@pytest.mark.parametrize("home", ["/proc/1", "/dev/null"])  # nothing can be made there, by root neither
def test_a_home_in_which_nothing_can_be_made_is_left_for_the_temporary_folder(
    home: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    assert cache_folder("built") == place / "tmp" / OWN / "built"


def test_a_user_without_a_home_has_the_temporary_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user that the machine does not know
    assert cache_folder("built") == place / "tmp" / OWN / "built"


@pytest.mark.parametrize("opened", WAYS)
def test_a_cache_that_others_can_write_to_is_left_for_the_temporary_folder(opened: Opened, place: Path) -> None:
    opened(cache_folder("built").parent, place)
    assert cache_folder("built") == place / "tmp" / OWN / "built"


@pytest.mark.parametrize("opened", WAYS)
def test_without_a_private_folder_there_is_one_line_and_an_exit_code(opened: Opened, place: Path) -> None:
    folder = shared_folder("stacks").parent
    opened(folder, place)
    with pytest.raises(PreflightError) as error:
        shared_folder("stacks")
    text = str(error.value)
    assert "\n" not in text and str(place / "tmp") in text and {"XDG_CACHE_HOME", "TMPDIR"} <= set(text.split())
    assert error.value.exit_code == ExitCode.ENVIRONMENT


def test_a_temporary_folder_that_all_can_write_to_is_private_below_with_the_sticky_bit(place: Path) -> None:
    """As /tmp is."""
    (place / "tmp").chmod(0o1777)
    assert shared_folder("stacks").parent == place / "tmp" / OWN


def test_a_folder_that_was_made_is_used_again() -> None:
    (cache_folder("built") / "library.so").touch()
    assert [file.name for file in cache_folder("built").iterdir()] == ["library.so"]
