"""What CONTRIBUTING.md adds, applied to a copy of the package, is there: one file and one registration each."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[1]
DIFFS = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
SHOWS = {
    "layer": """
from tests.evidence.samples import compiled, divergences, line, record
ranks = [record(rank, compiled(stack=(line(10 + rank),))) for rank in (0, 1)]
print(*(found.layer for found in divergences(*ranks)))
""",
    "fault": "from tests.faults.case import load; print(*load('planted'))",
    "check": """
from tests.evidence.samples import compiled
from tests.gate.test_checks import failed, healthy
print(failed("C", healthy(0), healthy(1, compiles=[compiled()] * 9)))
""",
    "label": """
from tests.evidence.timeline.test_label import labelled
print(labelled("(a10 >1@11)x3 a10 a10*", "(a10 <0@21)x3 a10 <0@21*").says)
""",
    "cli": "import sys; from tpcompile.cli import app; app(['causes'], standalone_mode=False)",
}
"""What is added -> a program that prints `SHOWN` if it is there."""
SHOWN = {
    "layer": "callers",
    "fault": "mode_string",
    "check": "'few compiles'>: (1,)",
    "label": "never sent",
    "cli": "graph break: ",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("git") is None, reason="git, which applies the diffs, is not here"),
]


def shown(what: str, tree: Path) -> bool:
    """Does the program print what it should, with the package of this tree?"""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tree)!r})\n{SHOWS[what]}"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=200)
    assert what == "cli" or done.returncode == 0, done.stderr
    return SHOWN[what] in done.stdout


def shown_here(what: str, folder: Path) -> bool:
    """The same with the package as it is, which a forked process has imported."""
    program = folder / "program.py"
    program.write_text(SHOWS[what])
    done = run_python([program])
    assert what == "cli" or done.returncode == 0, done.stderr
    return SHOWN[what] in done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, its tests and its presets."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("tpcompile", "tests", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("data"))
    return folder


@pytest.mark.parametrize(("what", "diff"), list(zip(SHOWS, DIFFS, strict=True)), ids=SHOWS)
def test_what_a_diff_adds_is_there_with_it_and_not_without(what: str, diff: str, tree: Path, tmp_path: Path) -> None:
    assert not shown_here(what, tmp_path)
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=tree, check=True)
    try:
        assert shown(what, tree)
    finally:
        subprocess.run(["git", "apply", "--reverse"], input=diff, text=True, cwd=tree, check=True)
