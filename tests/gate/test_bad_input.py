"""What cannot be run is one clear line, the right exit code, and nothing left running."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests import forked
from tests.gate.runs import REPRO
from tpcompile import config, gate
from tpcompile.errors import ExitCode, PreflightError
from tpcompile.evidence.records import Status
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate import faults
from tpcompile.gate.in_rank import run_in_rank
from tpcompile.ranks.env import RankEnv, choose_device
from tpcompile.request import RunRequest

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of rank 0 of 2 under torchrun, and its store; every refusal comes before the wait for rank 1."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**places, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    del store  # the server ends with it


@pytest.fixture
def repro() -> ModuleType:
    """repro/tp_compile_repro.py as a module."""
    spec = importlib.util.spec_from_file_location("tp_compile_repro", REPRO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(capsys: Capture, run_dir: Path, *overrides: str, **fields: object) -> tuple[ExitCode, str]:
    """Exit code of `gate.run` and its one line on stderr; the verdict, where it can be written, says the same."""
    code = gate.run(config.load("cpu_smoke", list(overrides), **fields), run_dir=run_dir)
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:7]) == ("", 1, "error: ")
    if run_dir.exists():
        verdict = RunDir(run_dir).read_verdict()
        assert verdict is not None
        assert (verdict.status, verdict.exit_code) == (Status.FAIL, code)
        assert err == f"error: {verdict.summary}\n"
    return code, err


@pytest.mark.usefixtures("two_ranks")
def test_tp_that_does_not_divide_the_heads_names_those_that_do(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, line = refused(capsys, tmp_path / "run")
    assert code == ExitCode.USAGE
    assert all(part in line for part in ("tp=3", "num_heads=8", "num_kv_heads=8", "ffn_dim=128", "[1, 2, 4, 8]"))


@pytest.mark.usefixtures("two_ranks")
def test_cuda_asked_for_and_absent(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, line = refused(capsys, tmp_path / "run", device="cuda")
    assert code == ExitCode.ENVIRONMENT
    assert "device=cuda" in line and "--device cpu" in line


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ranks = RankEnv(rank=0, local_rank=0, world_size=2, local_world_size=2)
    with pytest.raises(PreflightError, match=r"2 ranks .*1 GPU\(s\); .* 1 ranks"):
        choose_device("cuda", ranks)
    assert choose_device("auto", ranks).type == "cpu"


@pytest.mark.usefixtures("two_ranks")
def test_run_directory_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    code, line = refused(capsys, tmp_path / "file" / "run", device="cpu")
    assert code == ExitCode.ENVIRONMENT
    assert f"{tmp_path}/file/run" in line
    assert "--run-dir" in line


@pytest.mark.usefixtures("two_ranks")
def test_no_cpp_compiler(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    code, line = refused(capsys, tmp_path / "run", device="cpu")
    assert code == ExitCode.ENVIRONMENT
    assert "g++, c++ or clang++" in line
    assert "compile.backend=aot_eager" in line


@pytest.mark.usefixtures("two_ranks")
def test_unknown_fault_lists_the_known_ones(tmp_path: Path, capsys: Capture) -> None:
    code, line = refused(capsys, tmp_path / "run", fault="gremlin", device="cpu")
    assert code == ExitCode.USAGE
    assert "'gremlin'" in line and "averaged_statistics, backward_kernel, " in line


@pytest.mark.usefixtures("two_ranks")
def test_fault_that_needs_a_gpu_on_cpu(tmp_path: Path, capsys: Capture) -> None:
    assert "kernel_grids" in {fault.name for fault in faults.ALL.values() if fault.needs_gpu}
    code, line = refused(capsys, tmp_path / "run", fault="triton_kernel", device="cpu")
    assert code == ExitCode.ENVIRONMENT
    assert "'triton_kernel'" in line and "GPU" in line


def test_only_one_rank_prints_the_line(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for rank in (1, 0):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "1")  # refused before it is asked
        gate.run(config.load("cpu_smoke", fault="gremlin", device="cpu"), run_dir=tmp_path / "run")
        texts.append(capsys.readouterr().err)
    assert ["unknown fault" in text for text in texts] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--preset", "nope"], "unknown preset 'nope'; choose from cpu_smoke"),
        (["--set", "block.nope=1"], "unknown config key 'nope'; block has attention_backend, batch"),
        (["--set", "block.dim"], "--set 'block.dim': write key=value"),
        (["--set", "block.dim=[1"], "--set 'block.dim=[1': the value is not YAML"),
        (["--layers", "0"], "block.num_layers=0: Input should be greater than 0"),
    ],
)
def test_bad_arguments_of_the_repro_are_one_line(
    repro: ModuleType, arguments: list[str], line: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tp_compile_repro.py", *arguments])
    assert repro.main(repro.__doc__) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {line}")


def test_targets_are_looked_for_in_the_current_folder_whatever_script_started_the_rank(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert run_in_rank(RunRequest(target="no_function")) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1
    assert sys.path[0] == str(tmp_path)


def test_without_torchrun_the_repro_says_how_to_start_it(tmp_path: Path) -> None:
    command = [REPRO, "--run-dir", tmp_path / "run", "--device", "cpu"]
    found = forked.run_python(command, timeout_s=120)
    assert (found.returncode, found.stdout) == (ExitCode.USAGE, "")
    assert re.search("WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT .*; .*torchrun", found.stderr)
    assert found.stderr.count("\n") == 1


@pytest.mark.slow
def test_refusal_on_three_real_ranks_is_one_line_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [str(REPRO), "--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    ended = forked.torchrun(command, nproc=3)
    assert ended.returncode == 1  # torchrun knows no other
    assert ended.stderr.count("error: tp=3 ") == 1
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None
    assert verdict.exit_code == ExitCode.USAGE
    assert ended.left_running == ()
