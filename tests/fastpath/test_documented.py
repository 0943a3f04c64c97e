"""docs/fastpath.md as a user follows it: declare, certify, use under TP; then edit the kernel."""

from __future__ import annotations

import linecache
import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import forked
from tpcompile.cli import ending
from tpcompile.errors import DivergenceError
from tpcompile.fastpath import registered
from tpcompile.fastpath.certify import __main__
from tpcompile.testing import run_on_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fastpath.md"
DECLARED, USED = (part.partition("```")[0] for part in PAGE.read_text().split("```python\n")[1:3])


def test_a_fast_path_with_its_proof_takes_30_lines() -> None:
    assert len(list(filter(str.strip, DECLARED.splitlines()))) <= 30


INTERPRETED = {"TRITON_INTERPRET": "1"}
"""The command sets it for itself; a process forked from one that has imported Triton must begin with it."""


def certify(folder: Path, *arguments: str) -> forked.Ended:
    command = ["-m", "tpcompile", "certify", "head_norm", "--import", "my_kernels", *arguments]
    return forked.run_python(command, environ=os.environ | INTERPRETED, cwd=folder, timeout_s=280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the page's module, certified on 2 ranks."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_kernels.py").write_text(DECLARED)
    done = certify(folder, "--tp", "2", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100.0% of" in done.stdout and "written: " in done.stdout
    return folder


def use(folder: str) -> str:
    """On each rank: the page's second block; what its assertion says, or nothing."""
    sys.path.insert(0, folder)
    where = "fastpath.md"
    linecache.cache[where] = (len(USED), None, USED.splitlines(keepends=True), where)
    try:
        exec(compile(USED, where, "exec"), {})
    except DivergenceError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return run_on_ranks(use, str(folder), timeout_s=120)


@pytest.mark.ranks
def test_a_certified_fast_path_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert used(folder, monkeypatch) == ["", ""]
    assert certify(folder, "--check").returncode == 0


@pytest.mark.ranks
def test_an_edited_kernel_is_refused_until_it_is_certified_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_kernels.py").write_text(
        DECLARED.replace("tl.sum(values * values) / size", "tl.sum(values * values)")
    )
    (tmp_path / "certificates").symlink_to(folder / "certificates")
    why = used(tmp_path, monkeypatch)
    assert why[0] == why[1] and "my_kernels::head_norm" in why[0]
    done = certify(tmp_path, "--check")
    assert done.returncode == 1
    assert "`tpcompile certify head_norm --import MODULE`" in done.stdout
    failed = certify(tmp_path, "--tp", "2")
    assert failed.returncode == 1 and re.search(r"error: .*\bhead_norm: output 0 .*\d", failed.stderr)


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command sets it, in this process
    told = []
    shipped = "tpcompile.fastpath.kernels.all"
    wrong = (["--import", shipped, "--tp", "0"], ["--import", shipped, "--tp", "two"], ["--import", "nowhere"])
    for arguments in (*wrong, ["--import", shipped], []):
        with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["certify", "x", *arguments])
            ending.run(__main__.app, "tpcompile certify")
        assert ended.value.code == 2
        told.append(capsys.readouterr().err)
    assert "Missing option '--import'" in told.pop()
    names = ", ".join(sorted(registered()))
    facts = (
        "--tp '0': .*--tp 1,2,4,8",
        "--tp 'two': .*--tp 1,2,4,8",
        "--import: .*'nowhere'; .*",
        f".* x .*: {names}.*",
    )
    for text, fact in zip(told, facts, strict=True):
        assert re.fullmatch(rf"error: {fact}\n", text)
