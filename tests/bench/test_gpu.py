"""On GPUs: what a CPU cannot show of the benchmark, in a small run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.forked import run_python
from tests.gpus import printed_by
from tpcompile.bench.records import Measured, Report, Row

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
PEERS = "scripts/bench_peers/peers.py"
DTENSOR = f"{PEERS}:dtensor:graphed"
PROGRAMS = ("A", "C", "C:graphed", "C:one-shot:graphed", DTENSOR, f"{PEERS}:hooks:graphed")


@cache
def run() -> Measured:
    """By the first test that is not skipped."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        command = ["-m", "tpcompile", "bench", "--preset", "cpu_smoke", "--device", "cuda", "--rounds", "2"]
        command += ["--logs", str(folder / "logs"), "--json", str(folder / "report.json")]
        ended = run_python([*command, *(word for name in PROGRAMS for word in ("--program", name))], timeout_s=280)
        assert (ended.returncode, ended.left_running) == (0, ()), ended.stdout + ended.stderr
        (measured,) = Report.model_validate_json((folder / "report.json").read_text()).measured
    return measured


def rows() -> dict[str, Row]:
    """Of that run."""
    return {row.name: row for row in run().rows}


@pytest.mark.gpu(2)
def test_all_programs_are_measured() -> None:
    assert {name: row.why_not for name, row in rows().items()} == dict.fromkeys(PROGRAMS, "")
    assert all(row.peak_bytes for row in rows().values())


@pytest.mark.gpu(2)
def test_a_graph_is_one_launch_of_as_many_kernels() -> None:
    plain, graphed = rows()["C"].profile, rows()["C:graphed"].profile
    assert graphed.launches == 1
    assert graphed.kernels == plain.kernels
    assert plain.launches is not None and plain.launches > 1


@pytest.mark.gpu(2)
def test_collectives_are_seen_and_some_of_them_are_exposed() -> None:
    for name in ("A", "C", "C:graphed", "C:one-shot:graphed", DTENSOR):
        seen = rows()[name].profile
        assert seen.busy_ms and seen.communication_ms and seen.exposed_ms is not None, name
        assert 0 < seen.exposed_ms <= seen.communication_ms <= seen.busy_ms


@pytest.mark.gpu(2)
def test_energy_is_measured_or_the_run_says_why_not() -> None:
    if "tpcompile[energy]" in run().why_no_power:
        pytest.skip(run().why_no_power)  # says which package is missing
    assert not run().why_no_power
    for row in rows().values():
        assert row.power is not None and 50 < row.power.watts < 1.1 * row.power.limit_watts, row.name
        assert 0 < row.power.mhz <= row.power.most_mhz, row.name


@pytest.mark.gpu(1)
def test_the_kernel_that_reads_sees_all_elements(tmp_path: Path) -> None:
    program = """
import torch
from tpcompile.bench.reading import reader

source = torch.ones((1 << 28) + 3, device="cuda")
print(int(reader(source)().sum(dtype=torch.float64)) == source.numel())
"""
    assert printed_by(program, tmp_path) == ["True"]
