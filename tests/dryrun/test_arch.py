"""`tpcompile dryrun --arch`: kernels for a GPU that is not there, compared between the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dryrun.test_dryrun import dryrun
from tpcompile.evidence.records import Layer, Status

pytestmark = pytest.mark.slow
SM90 = ("--arch", "sm_90")
PROGRAMS = ("on_gpus:by_index", "compiled:own_kernel", "plans:tensor_parallel")


def test_a_rank_whose_kernels_differ_is_named(tmp_path: Path) -> None:
    """Its graph and its guards are those of the other ranks: nothing is found on meta."""
    fault = ("--world-size", "4", "--set", "odd=2")
    ended, _ = dryrun(tmp_path / "meta", *fault, function="kernels:build")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ended, verdict = dryrun(tmp_path / "gpu", *fault, *SM90, function="kernels:build")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdict is not None
    assert verdict.lead is not None
    assert list(verdict.lead.ranks) == [2]
    assert {one.layer for one in verdict.divergences if one.is_red} == {Layer.KERNELS}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_healthy_program_for_gpus_raises_no_alarm(program: str, tmp_path: Path) -> None:
    ended, verdict = dryrun(tmp_path, "--world-size", "2", *SM90, function=f"healthy.{program}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert verdict is not None
    (kernels,) = (check for check in verdict.checks if check.layer == Layer.KERNELS)
    assert kernels.status == Status.PASS


def test_an_architecture_that_is_not_known_is_one_line(tmp_path: Path) -> None:
    ended, verdict = dryrun(tmp_path, "--world-size", "2", "--arch", "sm_10", function="kernels:build")
    assert (ended.returncode, verdict) == (2, None)
    (line,) = ended.stderr.strip().splitlines()
    assert "sm_10" in line
