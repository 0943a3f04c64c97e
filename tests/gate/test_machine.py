"""What a library could not write is the machine; what the user's program could not write is the program."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import forked
from tests.gate.test_unwritable import small_disk
from tests.gate.unwritable import fill
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.failure import ADVICE, refused

PROGRAM = Path(__file__).with_name("unwritable.py")
BLOCK, TARGET = ("--layers", "1"), ("--target", "tests.gate.own:functional")
CASES = [("full", "C/first"), ("gone", "target/first"), ("full", "target/resized")]
"""A target has one kernel, the block a dozen for each length."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """For caches of compiled code: what Inductor writes depends on the machine's compiler."""
    with small_disk(tmp_path / "disk", "48m") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(("how", "moment"), CASES)
def test_inductor_s_cache_that_cannot_be_written_is_one_line_and_the_machine(
    how: str, moment: str, disk: Path, tmp_path: Path
) -> None:
    ended, run = gate(disk, tmp_path, f"cache-{how}", moment)
    assert (run.exit_code, ended.left_running) == (ExitCode.ENVIRONMENT, ()), run.summary
    reason = "No space left on device" if how == "full" else "File exists"
    assert reason in run.summary and ADVICE in run.summary and f"(phase {moment})" in run.summary
    assert "Traceback" not in ended.stderr.partition("torch/distributed/elastic")[0]


@pytest.mark.slow
def test_with_room_the_same_run_passes(disk: Path, tmp_path: Path) -> None:
    assert gate(disk, tmp_path, "cache-full", "never")[1].exit_code == ExitCode.PASS


def gate(disk: Path, folder: Path, how: str, moment: str) -> tuple[forked.Ended, Verdict]:
    """The gate with Inductor, whose cache becomes unwritable at that moment."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(disk / "cache")}
    flags = BLOCK if moment.startswith("C/") else TARGET
    command = [PROGRAM, how, moment, "--run-dir", folder / "run", "--device", "cpu", *flags]
    ended = forked.torchrun(command, environ=environ)
    verdict = RunDir(folder / "run").read_verdict()
    assert verdict is not None, ended.stderr[-1500:]
    return ended, verdict


@contextmanager
def raised() -> Iterator[list[str]]:
    """What the exception of the block is taken for."""
    found: list[str] = []
    try:
        yield found
    except Exception as error:
        found.append(refused(error))


def test_triton_s_cache_on_a_full_disk_is_the_machine(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(disk / "triton"))
    manager = cache.get_cache_manager("A" * 64)
    manager.put("small", "kernel.json", binary=False)
    fill(disk / "triton")
    with raised() as found:
        manager.put("x" * 100_000, "kernel.ptx", binary=False)
    assert found and re.match(f".*{os.strerror(errno.ENOSPC)}.*TORCHINDUCTOR_CACHE_DIR", found[0])


def test_a_file_in_the_place_of_triton_s_cache_is_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the message says why it is the machine: the call was the library's."""
    cache = pytest.importorskip("triton.runtime.cache")
    (tmp_path / "triton").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with raised() as found:
        cache.get_cache_manager("A" * 64)
    assert found and found[0].startswith(f"cannot write {tmp_path}/triton")


def test_a_full_disk_in_the_words_of_a_compiler_is_the_machine() -> None:
    line = "as: /tmp/ccA.o: No space left on device"
    with raised() as found:
        raise RuntimeError(f"C++ compile error\n\nOutput:\n{line}\n") from subprocess.CalledProcessError(1, ["g++"])
    assert line in found[0]


def test_what_the_program_itself_may_not_open_is_its_own_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raised() as found:
        (tmp_path / "file" / "weights").write_text("")
    assert found == [""]
    with raised() as found:
        raise OSError(errno.EACCES, "Permission denied", "weights.pt")
    assert found == [""]


def test_any_other_exception_is_not_the_machine() -> None:
    with raised() as found:
        raise ValueError("no such checkpoint")
    assert found == [""]
