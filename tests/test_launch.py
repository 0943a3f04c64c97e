from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.forked import PYTHONPATH, run_python
from tests.gate.runs import leftovers
from tpcompile import config, launch, process_tree
from tpcompile.errors import ConfigError, ExitCode, PreflightError
from tpcompile.evidence.records import Status, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.request import GateRequest

FAKE = Path(__file__).parent / "fake_gate.py"


def a_plan(tmp_path: Path, behaviour: str, *, torchrun: bool = False, timeout_s: float = 120.0) -> launch.Plan:
    """Two ranks of the fake gate, under torchrun or under its own tiny stand-in."""
    run_dir = tmp_path / "run"
    RunDir.create(run_dir)
    args = ["--run-dir", str(run_dir)]
    command = launch.torchrun(2, [str(FAKE), *args]) if torchrun else [sys.executable, str(FAKE), *args]
    fake = {"FAKE_BEHAVIOUR": behaviour, "FAKE_WORLD": "2", "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return launch.Plan(
        command=tuple(command),
        environ={**os.environ, **fake},
        nproc=2,
        device="cpu",
        config=config.load("cpu_smoke"),
        run_dir=run_dir,
        timeout_s=timeout_s,
    )


def run(plan: launch.Plan) -> tuple[int, Verdict, str]:
    """Exit code, published verdict, terminal text."""
    out = io.StringIO()
    code = launch.run(plan, Console(file=out, width=80))
    verdict = RunDir(plan.run_dir).read_verdict()
    assert verdict is not None
    return code, verdict, out.getvalue()


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for a PATH that holds only what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def install(folder: Path, name: str, text: str = "") -> None:
    """Put a shell script on the fake PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def with_gpus(folder: Path, count: int) -> dict[str, str]:
    """Environment in which nvidia-smi lists `count` GPUs and a compiler exists."""
    install(folder, "nvidia-smi", "\n".join(f"echo 'GPU {n}: Some (UUID: GPU-{n})'" for n in range(count)))
    install(folder, "g++")
    return {"PATH": str(folder)}


# Preflight: before any process starts


def test_gpus_are_counted_by_nvidia_smi(tools: Path) -> None:
    assert launch.count_gpus(with_gpus(tools, 8)) == 8


def test_without_nvidia_smi_there_are_no_gpus(tools: Path) -> None:
    assert launch.count_gpus({"PATH": str(tools)}) == 0


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-1,GPU-2", 2)])
def test_cuda_visible_devices_hides_gpus(tools: Path, visible: str, count: int) -> None:
    assert launch.count_gpus(with_gpus(tools, 8) | {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_more_ranks_than_gpus_is_refused(tools: Path, tmp_path: Path) -> None:
    request = GateRequest(nproc=8, run_dir=tmp_path / "run")
    with pytest.raises(PreflightError, match=r"8 .* 2 GPUs.*--nproc 2 .*--device one_gpu"):
        launch.plan(request, with_gpus(tools, 2))


def test_ranks_can_share_one_gpu(tools: Path, tmp_path: Path) -> None:
    request = GateRequest(nproc=2, device="one_gpu", run_dir=tmp_path / "run")
    assert launch.plan(request, with_gpus(tools, 1)).device == "one_gpu"


def test_cuda_without_a_gpu_is_refused(tools: Path, tmp_path: Path) -> None:
    install(tools, "g++")
    with pytest.raises(PreflightError, match="GPU"):
        launch.plan(GateRequest(device="cuda", run_dir=tmp_path / "run"), {"PATH": str(tools)})


@pytest.mark.parametrize("preset", ["wan14b", "wan14b_256", "wan14b_8", "wan21_14b", "llama8b"])
def test_a_preset_for_gpus_runs_on_cpu_only_when_cpu_is_asked_for(tools: Path, tmp_path: Path, preset: str) -> None:
    install(tools, "g++")
    environ = {"PATH": str(tools)}
    with pytest.raises(PreflightError, match=rf"{preset} .*--device cpu"):
        launch.plan(GateRequest(preset=preset, run_dir=tmp_path / "auto"), environ)
    assert not (tmp_path / "auto").exists()
    asked = GateRequest(preset=preset, device="cpu", run_dir=tmp_path / "cpu")
    assert launch.plan(asked, environ).device == "cpu"


@pytest.mark.parametrize("preset", ["cpu_smoke", "llama_smoke", "wan21_smoke"])
def test_a_small_preset_runs_on_cpu_without_being_asked_to(tools: Path, tmp_path: Path, preset: str) -> None:
    install(tools, "g++")
    assert launch.plan(GateRequest(preset=preset, run_dir=tmp_path / "run"), {"PATH": str(tools)}).device == "cpu"


def test_a_tp_that_does_not_divide_the_heads_names_those_that_do(tools: Path, tmp_path: Path) -> None:
    install(tools, "g++")
    with pytest.raises(ConfigError, match=r"tp=3 .*\[1, 2, 4, 8\]"):
        launch.plan(GateRequest(nproc=3, run_dir=tmp_path / "run"), {"PATH": str(tools)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "nope"}, "unknown preset 'nope'"),
        ({"overrides": ["block.nope=1"]}, "unknown config key 'nope'"),
        ({"layers": 0}, r"block.num_layers=0: .*greater than 0"),
        ({"dtype": "int8"}, r"block.dtype='int8'"),
        ({"mode": "D"}, r"modes.0='D'"),
        ({"nproc": 0}, "at least one rank"),
    ],
)
def test_bad_requests_are_usage_errors(tools: Path, tmp_path: Path, fields: dict[str, object], message: str) -> None:
    install(tools, "g++")
    with pytest.raises(ConfigError, match=message):
        launch.plan(GateRequest(run_dir=tmp_path / "run", **fields), {"PATH": str(tools)})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_no_compiler_is_refused_for_inductor_on_cpu_only(tools: Path, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="no C\\+\\+ compiler"):
        launch.plan(GateRequest(run_dir=tmp_path / "a"), {"PATH": str(tools)})
    eager = GateRequest(run_dir=tmp_path / "b", overrides=["compile.backend=eager"])
    assert launch.plan(eager, {"PATH": str(tools)}).device == "cpu"


def test_a_compiler_that_is_not_called_gxx_is_handed_to_inductor(tools: Path, tmp_path: Path) -> None:
    install(tools, "clang++")
    plan = launch.plan(GateRequest(run_dir=tmp_path / "run"), {"PATH": str(tools)})
    assert plan.environ["CXX"] == "clang++"


def test_a_cxx_that_does_not_exist_is_named(tools: Path) -> None:
    install(tools, "g++")
    with pytest.raises(PreflightError, match="CXX=nope"):
        launch.cxx_compiler({"PATH": str(tools), "CXX": "nope"})


def test_a_run_directory_that_cannot_be_written_is_refused(tools: Path, tmp_path: Path) -> None:
    install(tools, "g++")
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match=r".*--run-dir"):
        launch.plan(GateRequest(run_dir=tmp_path / "file" / "run"), {"PATH": str(tools)})


def test_a_run_directory_with_a_verdict_is_refused_since_it_would_pass_for_the_new_one(
    tools: Path, tmp_path: Path
) -> None:
    install(tools, "g++")
    old = Verdict(status=Status.PASS, exit_code=0, world_size=2, summary="old")
    RunDir.create(tmp_path / "run").write_verdict(old)
    with pytest.raises(ConfigError, match="already holds"):
        launch.plan(GateRequest(run_dir=tmp_path / "run"), {"PATH": str(tools)})


def test_on_cpu_the_defaults_are_two_ranks_of_cpu_smoke(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tools, "g++")
    monkeypatch.chdir(tmp_path)
    plan = launch.plan(GateRequest(), {"PATH": str(tools)})
    assert (plan.nproc, plan.device, plan.config.preset, plan.config.modes) == (2, "cpu", "cpu_smoke", ("C",))
    assert plan.run_dir.match("runs/*-cpu_smoke-tp2-*")
    assert plan.command[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert plan.command[3:6] == ("--standalone", "--nproc-per-node", "2")
    assert plan.command[6:] == ("-m", "tpcompile.gate", str(plan.run_dir))


def test_one_gpu_is_no_job_of_one_rank_unless_that_is_asked_for(tools: Path, tmp_path: Path) -> None:
    environ = with_gpus(tools, 1)
    alone = launch.plan(GateRequest(nproc=1, run_dir=tmp_path / "alone"), environ)
    plan = launch.plan(GateRequest(run_dir=tmp_path / "run"), environ)
    assert [(one.nproc, one.device) for one in (alone, plan)] == [(1, "cuda"), (2, "cpu")]


def test_a_target_whose_module_is_not_here_is_refused_before_the_start(tmp_path: Path) -> None:
    request = GateRequest(device="cpu", run_dir=tmp_path / "run", target="nowhere_at_all:build")
    with pytest.raises(ConfigError, match="module nowhere_at_all "):
        launch.plan(request)
    assert not (tmp_path / "run").exists()
    assert launch.plan(GateRequest(device="cpu", run_dir=tmp_path / "run", target="tests.fake_gate:main")).nproc == 2


def test_on_gpus_the_defaults_are_all_of_them_and_wan14b(tools: Path, tmp_path: Path) -> None:
    plan = launch.plan(GateRequest(run_dir=tmp_path / "run"), with_gpus(tools, 8))
    assert (plan.nproc, plan.device, plan.config.preset) == (8, "cuda", "wan14b")


def in_a_fork(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Stands for `subprocess.run` of `python ...`: what it imports is there already."""
    assert command[0] == sys.executable
    ended = run_python(command[1:])
    return subprocess.CompletedProcess(command, ended.returncode, ended.stdout, ended.stderr)


def test_every_option_reaches_the_ranks_in_config_json(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tools, "g++")
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": in_a_fork}))
    request = GateRequest(
        nproc=2,
        mode="all",
        layers=3,
        train=True,
        dtype="bfloat16",
        overrides=["block.seq_len=32", "gate.steady_calls=3"],
        run_dir=tmp_path / "run",
        device="cpu",
        fault="rank_branch",
        fault_rank=1,
    )
    plan = launch.plan(request, {"PATH": str(tools)})
    found = RunDir(tmp_path / "run").read_config()
    assert (found, found.sha256) == (plan.config, plan.config.sha256)
    assert (found.modes, found.train, found.device) == (("A", "B", "C"), True, "cpu")
    assert (found.fault, found.fault_rank, found.gate.steady_calls) == ("rank_branch", 1, 3)
    assert (found.block.num_layers, found.block.dtype, found.block.seq_len) == (3, "bfloat16", 32)


def test_omp_threads_share_the_cores_unless_the_user_set_them(tools: Path, tmp_path: Path) -> None:
    install(tools, "g++")
    plan = launch.plan(GateRequest(nproc=8, run_dir=tmp_path / "a"), {"PATH": str(tools)})
    assert plan.environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 8))
    own = {"PATH": str(tools), "OMP_NUM_THREADS": "7"}
    assert launch.plan(GateRequest(run_dir=tmp_path / "b"), own).environ["OMP_NUM_THREADS"] == "7"
    assert "PYTHONHASHSEED" not in plan.environ


# Whole runs


@pytest.mark.slow
@pytest.mark.parametrize(("behaviour", "code"), [("pass", 0), ("killed", 1)])
def test_torchrun_ends_with_the_right_code(tmp_path: Path, behaviour: str, code: int) -> None:
    found, verdict, text = run(a_plan(tmp_path, behaviour, torchrun=True))
    assert (found, verdict.exit_code) == (code, code)
    assert RunDir(tmp_path / "run").junit.exists()
    assert f"(exit {code})" in text
    if behaviour == "killed":
        assert "rank 1 died" in verdict.summary
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("behaviour", "code"), [("red", 1), ("preflight", 4), ("silent", 3)])
def test_the_exit_code_is_that_of_the_verdict(tmp_path: Path, behaviour: str, code: int) -> None:
    found, verdict, _ = run(a_plan(tmp_path, behaviour))
    assert (found, verdict.exit_code) == (code, code)


def test_a_verdict_that_only_saw_the_job_stop_is_completed_by_the_rank_that_died(tmp_path: Path) -> None:
    code, verdict, text = run(a_plan(tmp_path, "killed_unknown"))
    assert code == ExitCode.FAIL
    assert "FAIL (exit 1)" in text and "SIGTERM" in text and "SIGTERM" in verdict.summary


def test_a_crash_after_a_passed_verdict_is_not_a_pass(tmp_path: Path) -> None:
    code, verdict, text = run(a_plan(tmp_path, "crash_after_pass"))
    assert (code, verdict.exit_code, verdict.status) == (ExitCode.BUG, ExitCode.BUG, Status.FAIL), "on disk, too"
    assert re.search(r"FAIL .*code 1 .*code 0", text) and "(exit 3)" in text
    junit = RunDir(tmp_path / "run").junit.read_text()
    assert 'failures="1"' in junit and re.search("expected code 0; .*code 1", junit)


@pytest.mark.parametrize("behaviour", ["hang", "stubborn"])
def test_a_timeout_kills_every_rank_and_names_their_phase(
    tmp_path: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "GRACE_S", 0.5)
    code, verdict, _ = run(a_plan(tmp_path, behaviour, timeout_s=12))
    assert (code, verdict.exit_code) == (124, 124)
    assert "ranks 0-1" in verdict.summary
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_and_leaves_nothing_running(tmp_path: Path, signum: signal.Signals) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while len(RunDir(tmp_path / "run").read_statuses()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signum)

    plan = a_plan(tmp_path, "hang")
    thread = threading.Thread(target=interrupt)
    thread.start()
    code, verdict, _ = run(plan)
    thread.join()
    assert (code, verdict.exit_code) == (128 + signum, 128 + signum)
    assert signum.name in verdict.summary
    assert leftovers(tmp_path) == []


def test_an_interrupt_while_ranks_start_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that are interrupted while they import print a traceback each, torchrun its own report."""
    started = tmp_path / "started"

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    plan = a_plan(tmp_path, "hang")
    code = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)"
    thread = threading.Thread(target=interrupt)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exit_code, verdict, text = run(dataclasses.replace(plan, command=(sys.executable, "-c", code)))
    thread.join()
    assert (exit_code, verdict.exit_code) == (130, 130)
    (line,) = text.splitlines()
    assert line.startswith("FAIL (exit 130)")
    assert "KeyboardInterrupt" not in capfd.readouterr().err
    assert "KeyboardInterrupt" in (plan.run_dir / "logs" / "torchrun.log").read_text()


@pytest.mark.slow
def test_an_unknown_fault_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": in_a_fork}))
    request = GateRequest(device="cpu", run_dir=tmp_path / "run", fault="rank_constnat")
    with pytest.raises(ConfigError, match=r"unknown fault 'rank_constnat'.*rank_constant"):
        launch.plan(request)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_fault_on_a_rank_that_does_not_exist_is_refused(tmp_path: Path, rank: int) -> None:
    request = GateRequest(device="cpu", nproc=2, run_dir=tmp_path / "run", fault="rank_constant", fault_rank=rank)
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        launch.plan(request)
