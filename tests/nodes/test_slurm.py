"""`sbatch configs/slurm/gate.sbatch` on two nodes, by Slurm itself; skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.forked import ROOT
from tests.gate.runs import AOT
from tests.nodes.machines import Nodes
from tests.nodes.slurm import Cluster, slurm_on, why_no_slurm
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
SCRIPT = ROOT / "configs" / "slurm" / "gate.sbatch"
NO_GPUS = "--gpus-per-node=0"
"""Options of sbatch go before those in the script."""


@pytest.fixture
def cluster(nodes: Nodes) -> Iterator[Cluster]:
    reason = why_no_slurm()
    if reason:
        pytest.skip(reason)
    # Not `tmp_path`: Slurm makes sockets below the folder, whose paths may have 108 characters.
    with TemporaryDirectory(dir="/tmp") as folder, slurm_on(nodes, Path(folder)) as made:
        yield made


def gate(cluster: Cluster, *flags: str, tasks: int) -> tuple[int, Verdict, str]:
    """The exit code of the job, its verdict and its output, with so many ranks on each node."""
    arguments = ["tests.gate.own:functional", "--device", "cpu", "--set", AOT[0], *flags]
    code, output = cluster.batch(SCRIPT, [NO_GPUS, f"--ntasks-per-node={tasks}"], arguments, 150.0)
    (folder,) = (cluster.folder / "runs").iterdir()
    verdict = RunDir(folder).read_verdict()
    assert verdict is not None, output
    return code, verdict, output


def test_a_healthy_model_is_green(cluster: Cluster) -> None:
    code, verdict, output = gate(cluster, tasks=1)
    assert code == ExitCode.PASS, output
    assert verdict.exit_code == ExitCode.PASS
    assert verdict.hosts == {"node-a": (0,), "node-b": (1,)}


def test_a_fault_on_one_rank_is_named_with_its_host_and_the_job_has_the_code_of_the_gate(cluster: Cluster) -> None:
    code, verdict, output = gate(cluster, "--set", "fault=dtype", tasks=2)
    assert code == ExitCode.FAIL, output
    assert verdict.hosts == {"node-a": (0, 1), "node-b": (2, 3)}
    assert verdict.lead is not None
    assert verdict.lead.ranks == (1,)
    assert "rank 1 (node-a)" in output
