"""The gate and `tpcompile run` on two nodes, as Slurm and Kubeflow start them; no folder is shared."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forked import ROOT, TORCHRUN, became, run_python
from tests.gate.runs import AOT
from tests.nodes.machines import PORT, Node, Nodes
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence.logs.diagnose import diagnose
from tpcompile.evidence.records import Check, CheckId, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.replay import replay
from tpcompile.report.page.of_run import timed_events

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
PROGRAM = Path(__file__).with_name("program.py")
ON_CPU = ["--device", "cpu", "--set", AOT[0]]


def verdict_in(folder: Path) -> Verdict:
    """What is in a run directory."""
    found = RunDir(folder).read_verdict()
    assert found is not None
    return found


def red(verdict: Verdict) -> dict[CheckId, Check]:
    """Its failed checks."""
    return {check.id: check for check in verdict.checks if check.is_red}


# Kubeflow


def pod(number: int, job: dict[str, Any]) -> dict[str, str]:
    """What the runtime of Kubeflow Trainer sets in a pod of a TrainJob; a rank for each, as there are no GPUs."""
    return {
        "PET_NNODES": str(job["spec"]["trainer"]["numNodes"]), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": "node-a", "PET_MASTER_PORT": str(PORT),
    }  # fmt: skip


def start_train_job(nodes: Nodes, target: str, *flags: str) -> None:
    """The command of the TrainJob in two pods, with a target of the tests."""
    job = yaml.safe_load((ROOT / "configs" / "kubernetes" / "trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    launcher, *command = trainer["command"]
    assert (launcher, trainer["args"][-1]) == ("torchrun", "my_model:build")
    arguments = [*command, *trainer["args"][:-1], f"tests.gate.own:{target}", *ON_CPU, *flags]
    for number, node in enumerate(nodes):
        nodes.start(node, [*TORCHRUN, *arguments], pod(number, job))


def test_the_train_job_names_the_pod_and_its_folders_are_judged_as_one(nodes: Nodes, tmp_path: Path) -> None:
    start_train_job(nodes, "functional", "--set", "fault=dtype")
    ended = nodes.wait()
    assert [one.returncode for one in ended.values()] == [1, 1]
    folders = [node.folder / "runs" / "gate" for node in nodes]
    for folder in folders:
        assert verdict_in(folder).hosts == {"node-a": (0,), "node-b": (1,)}
    assert "(node-a, node-b)" in verdict_in(folders[0]).summary or "(node-b)" in verdict_in(folders[0]).summary

    together = run_python(["-m", "tpcompile", "compare", *folders, "--json", tmp_path / "verdict.json"])
    assert together.returncode == ExitCode.FAIL, together.stderr
    assert CheckId.REPORTED not in red(Verdict.model_validate_json((tmp_path / "verdict.json").read_text()))

    alone = red(replay(RunDir(folders[0])))
    assert alone[CheckId.REPORTED].ranks == (1,)
    assert "node-b" in alone[CheckId.REPORTED].observed

    other = shutil.copytree(folders[1], tmp_path / "other")
    record = other / "rank_1" / "record.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "job": "another"}))
    with pytest.raises(ConfigError, match="different runs"):
        replay(RunDir(folders[0]), [RunDir(other)])


def test_the_gate_ends_on_both_sides_of_a_link_that_is_cut(nodes: Nodes) -> None:
    limits = ("--set", "gate.store_timeout_s=6", "--set", "gate.steady_calls=100000")
    start_train_job(nodes, "functional", *limits)
    status = nodes.a.folder / "runs" / "gate" / "rank_0" / "status.json"
    assert became(lambda: status.exists() and "steady" in status.read_text()), nodes.output("node-a")
    nodes.b.cable("down")
    ended = nodes.wait(60.0)
    assert [one.returncode for one in ended.values()] == [1, 1]
    for node, away in ((nodes.a, "node-b"), (nodes.b, "node-a")):
        lead = verdict_in(node.folder / "runs" / "gate").lead
        assert lead is not None
        assert lead.cause == Cause.STOPPED_RESPONDING
        assert away in lead.says


# Slurm


def srun_of(script: Path, arguments: list[str], folder: Path) -> list[str]:
    """The command that a batch script gives to srun."""
    stub = folder / "srun"
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", script, *arguments], env=environ, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def task(node: int) -> dict[str, str]:
    """What Slurm sets in the task of a node."""
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node-a,node-b", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": str(node), "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0", "MASTER_ADDR": "node-a",
    }  # fmt: skip


def test_the_batch_script_runs_the_gate_as_a_step_of_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    script = ROOT / "configs" / "slurm" / "gate.sbatch"
    *options, command = [srun_of(script, ["tests.gate.own:functional", *ON_CPU], tmp_path)]
    assert options == []
    start = command.index("tpcompile")
    assert command[:start] == ["--kill-on-bad-exit=0"]
    for number, node in enumerate(nodes):
        nodes.start(node, ["-m", *command[start:]], task(number))
    ended = nodes.wait()
    assert [one.returncode for one in ended.values()] == [0, 0], ended["node-a"].stderr[-2000:]
    for node in nodes:
        verdict = verdict_in(node.folder / "runs" / "gate-7")
        assert (verdict.exit_code, set(verdict.hosts)) == (ExitCode.PASS, {"node-a", "node-b"})


# tpcompile run


def run_watched(nodes: Nodes, node: Node, rank: int, **environ: str) -> None:
    """`tpcompile run -- python program.py` in a pod of a PyTorchJob, whose variables say which rank it is."""
    variables = {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": str(PORT), **environ,
    }  # fmt: skip
    command = ["-m", "tpcompile", "run", "--run-dir", "run", "--", sys.executable, PROGRAM, "recompiles", "40"]
    nodes.start(node, command, variables, fresh=True)


def shifted_clock(folder: Path, seconds: int) -> str:
    """A library that shifts the clock of the processes that load it."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", f"-DSHIFT={seconds}", source, "-o", library], check=True)
    return str(library)


def test_a_watched_job_with_a_clock_that_is_wrong_by_an_hour(nodes: Nodes, tmp_path: Path) -> None:
    run_watched(nodes, nodes.a, 0)
    run_watched(nodes, nodes.b, 1, LD_PRELOAD=shifted_clock(tmp_path, 3600))
    ended = nodes.wait()
    runs = [node.folder / "run" for node in nodes]
    for one, run in zip(ended.values(), runs, strict=True):
        assert one.returncode == 1, one.stderr[-2000:]
        assert "rank 1 (node-b)" in one.stderr
        assert verdict_in(run).hosts == {"node-a": (0,), "node-b": (1,)}
    # The page of both: what the ranks did at one time stands at one place.
    both = shutil.copytree(runs[0], tmp_path / "both")
    shutil.copytree(runs[1], both, dirs_exist_ok=True)
    starts = {rank: [event.start for event in events] for rank, events in timed_events(RunDir(both)).items()}
    assert set(starts) == {0, 1}
    assert max(map(max, starts.values())) - min(map(min, starts.values())) < 600

    assert diagnose([run / "trace" for run in runs]).world_size == 2
    (watched,) = (runs[1] / "watched").glob("rank_1.json")
    watched.write_text(json.dumps({**json.loads(watched.read_text()), "job": "another"}))
    with pytest.raises(ConfigError, match="different runs"):
        diagnose([runs[0] / "trace", runs[1] / "trace"])
