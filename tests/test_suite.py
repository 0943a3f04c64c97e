"""The suite itself: no test file is left out of it."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def test_pytest_looks_into_every_folder_with_tests(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {part for path in TESTS.rglob("test_*.py") for part in path.relative_to(TESTS).parts[:-1]}
    assert "dist" in folders
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in left_out)]
