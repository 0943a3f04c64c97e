"""The programs of examples/ that a user runs, one for each kind of use; each is green, and red with its fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH, ROOT, Ended, run_python, torchrun
from tpcompile.evidence.records import Check, CheckId, Verdict
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]
EXAMPLES = ROOT / "examples"


def verdicts(folder: Path) -> list[Verdict]:
    """Those of the runs in that folder."""
    found = [RunDir(path).read_verdict() for path in folder.glob("runs/*")]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("name", ["check_loop", "sentinel_loop"])
def test_a_loop_whose_ranks_agree_ends_well(name: str, tmp_path: Path) -> None:
    ended = torchrun([EXAMPLES / f"{name}.py"], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert verdicts(tmp_path) == []
    assert ("PASS (exit 0)" in ended.stdout) == (name == "check_loop")


@pytest.mark.parametrize(
    ("name", "fault", "title"),
    [("check_loop", "--rank-constant", "check"), ("sentinel_loop", "--odd-batch", "sentinel")],
)
def test_a_loop_with_its_fault_is_red_on_rank_1(name: str, fault: str, title: str, tmp_path: Path) -> None:
    """The title is what the program uses, although a sentinel watches it in both."""
    ended = torchrun([EXAMPLES / f"{name}.py", fault], cwd=tmp_path)
    assert ended.returncode == 1
    assert re.findall(r"^tpcompile (\w+): ", ended.stderr, re.MULTILINE) == [title]
    (verdict,) = verdicts(tmp_path)
    assert verdict.exit_code == 1 and verdict.lead is not None
    assert 1 in verdict.lead.ranks


def gate(folder: Path, *settings: str) -> dict[str, Check]:
    """Checks of the gate on the target, by id."""
    flags = ["--nproc", "2", "--device", "cpu", "--run-dir", folder / "run", "--set", "compile.backend=aot_eager"]
    command = ["-m", "tpcompile", "gate", "--target", "examples.gate_target:build", *flags, *settings]
    ended = run_python(command, environ={**os.environ, "PYTHONPATH": PYTHONPATH}, cwd=ROOT)
    verdict = RunDir(folder / "run").read_verdict()
    assert verdict is not None, ended.stderr
    assert ended.returncode == verdict.exit_code == any(check.is_red for check in verdict.checks)
    return {check.id: check for check in verdict.checks}


def test_the_target_of_the_gate_is_right(tmp_path: Path) -> None:
    checks = gate(tmp_path)
    assert not any(check.is_red for check in checks.values())
    assert checks[CheckId.FORWARD].status == "pass"


def test_a_mean_in_place_of_the_sum_is_wrong_numbers(tmp_path: Path) -> None:
    assert gate(tmp_path, "--set", "averaged=1")[CheckId.FORWARD].is_red


def test_the_pytest_file_passes() -> None:
    """In a process of its own: pytest cannot be imported again where it is forked from."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_on_ranks.py")]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    plugin = () if is_registered() else ("-p", "tpcompile.pytest_plugin")
    ended = subprocess.run([*command, *plugin], env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "3 passed" in ended.stdout


def is_registered() -> bool:
    """True where tpcompile is installed: pytest then loads its plugin by itself."""
    return any(one.value == "tpcompile.pytest_plugin" for one in metadata.entry_points(group="pytest11"))


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the two files of the fast path: a certificate is written beside the module."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "examples").mkdir()
    for name in ("__init__.py", "fast_path.py", "use_fast_path.py"):
        shutil.copy(EXAMPLES / name, folder / "examples" / name)
    return folder


def environ(user: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{user}{os.pathsep}{PYTHONPATH}", "TRITON_INTERPRET": "1"}


def use(user: Path) -> Ended:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "examples.use_fast_path"]
    return run_python(command, environ=environ(user) | {"OMP_NUM_THREADS": "1"}, cwd=user)


def test_the_fast_path_is_refused_until_it_is_certified(user: Path) -> None:
    assert use(user).returncode == 1
    command = [
        "-m",
        "tpcompile",
        "certify",
        "head_norm",
        "--import",
        "examples.fast_path",
        "--tp",
        "2",
        "--jobs",
        "2",
    ]
    certified = run_python(command, environ=environ(user), cwd=user, timeout_s=280)
    assert certified.returncode == 0, certified.stdout + certified.stderr
    (written,) = (user / "examples" / "certificates").iterdir()
    assert json.loads(written.read_text())["name"] == "head_norm"
    used = use(user)
    assert used.returncode == 0, used.stdout
    assert "used: head_norm" in used.stdout
