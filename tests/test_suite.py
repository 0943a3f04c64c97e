"""The suite: no file is left out, tests that start ranks are marked, and none waits for ranks longer than pytest."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import forked
from tests.conftest import GPUS, changed_since, longest_first, starts_ranks
from tpcompile import testing
from tpcompile.launch import count_gpus

TESTS = Path(__file__).resolve().parent


def test_pytest_looks_into_every_folder_with_tests(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {part for path in TESTS.rglob("test_*.py") for part in path.relative_to(TESTS).parts[:-1]}
    assert "collectives" in folders
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in left_out)]


def item(file: str, *marks: str) -> Any:
    return SimpleNamespace(path=forked.ROOT / file, iter_markers=lambda: [SimpleNamespace(name=mark) for mark in marks])


def test_files_that_take_longest_begin_first_and_are_not_divided() -> None:
    items = [item("quick.py"), item("ranks.py", "ranks"), item("one.py", "slow"), item("quick.py")]
    items += [item("long.py", "ranks", "long"), item("one.py"), item("ranks.py")]
    found = [one.path.name for one in longest_first(items)]
    assert set(found[:3]) == {"one.py", "long.py"} and found[3:] == ["ranks.py"] * 2 + ["quick.py"] * 2
    assert "".join(found[:3]).count("one.pyone.py") == 1


def waits(tree: ast.Module) -> Iterator[tuple[int, float]]:
    """(line, seconds) of every `timeout_s=` of a call, by number or by a constant of the module."""
    constants = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            constants[node.targets[0].id] = node.value.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for argument in node.keywords:
                value = argument.value
                seconds = constants.get(value.id) if isinstance(value, ast.Name) else getattr(value, "value", None)
                if argument.arg == "timeout_s" and isinstance(seconds, int | float):
                    yield node.lineno, seconds


def too_long(source: str, limit_s: float) -> list[tuple[int, float]]:
    """Waits that pytest cuts short, where no rank can be named any more; a file may have a limit of its own."""
    tree = ast.parse(source)
    if "pytest.mark.timeout" in source:
        return []
    return [(line, seconds) for line, seconds in waits(tree) if seconds >= limit_s]


def test_no_test_waits_for_its_ranks_longer_than_pytest_waits_for_it(pytestconfig: pytest.Config) -> None:
    limit_s = float(pytestconfig.getini("timeout"))
    found = {path.name: too_long(path.read_text(), limit_s) for path in sorted(TESTS.rglob("test_*.py"))}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_wait_of_the_limit_or_longer_is_found_by_number_and_by_name() -> None:
    source = "LIMIT_S = 400\nrun_on_ranks(f, timeout_s=LIMIT_S)\nrun_on_ranks(f, timeout_s=300)\nrun(f, timeout_s=299)"
    assert too_long(source, 300.0) == [(2, 400), (3, 300)]
    assert too_long(f"pytestmark = pytest.mark.timeout(460)\n{source}", 300.0) == []


@cache
def _results() -> list[int]:
    return [sum(testing.run_on_ranks(len, "")) for _ in range(2)]


def _by_a_helper() -> None:
    assert _results()


def _by_torchrun() -> None:
    assert forked.torchrun(["program.py"]).returncode == 0


def _alone() -> None:
    assert too_long("", 300.0) == []


def test_a_test_that_starts_ranks_by_any_helper_is_distinguished_from_one_that_does_not() -> None:
    assert starts_ranks([_by_a_helper])
    assert starts_ranks([_alone, _by_torchrun])
    assert not starts_ranks([_alone])


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("nvidia_smi")
def test_a_test_sees_no_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert count_gpus() == 1


@pytest.mark.gpu(0)
def test_a_test_that_is_marked_sees_the_gpus() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == GPUS


def missing(script: str) -> list[str]:
    """Test files that a script names and that are not there."""
    words = re.findall(r"tests/[\w/{},.]+", script)
    command = f"printf '%s\\n' {' '.join(words)}"  # bash expands the braces
    expanded = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return [path for path in expanded.stdout.split() if not (TESTS.parent / path).exists()]


def test_ci_names_test_files_that_are_there() -> None:
    """pytest runs nothing at all where one of them is not."""
    assert missing((TESTS.parent / ".ci/run").read_text()) == []
    assert missing("tests/test_suite.py tests/test_{suite,nowhere}.py::test_x") == ["tests/test_nowhere.py"]


def test_a_module_that_sets_a_variable_for_all_others_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and workers inherit it: Triton's interpreter in all of them, once."""
    before = dict(os.environ)
    assert changed_since(before) == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("TPCOMPILE_TEST_GPUS")
    assert changed_since(before) == ["TPCOMPILE_TEST_GPUS", "TRITON_INTERPRET"]
