"""Programs that learn their rank, in every way that we know of: none of them is taken to be the same on all ranks."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from torch._dynamo import device_interface

from tests.dryrun.learns import WAYS
from tests.dryrun.test_dryrun import dryrun
from tests.dryrun.watched import NOTHING
from tests.forked import ROOT, run_python
from tpcompile.dryrun.reads import watched_reads


@pytest.fixture(scope="module")
def seen() -> dict[str, list[tuple[str, int]] | None]:
    ended = run_python(["-m", "tests.dryrun.watched"], cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_learns_its_rank_is_seen(way: str, seen: dict[str, list[tuple[str, int]] | None]) -> None:
    assert seen[way]


def test_what_is_alike_on_all_ranks_is_no_read(seen: dict[str, list[tuple[str, int]] | None]) -> None:
    assert seen[NOTHING] == []


@pytest.mark.parametrize("way", ["mesh, attribute", "shard"])
def test_a_difference_on_a_rank_in_the_middle_is_named(way: str, tmp_path) -> None:
    ended, verdict = dryrun(
        tmp_path, "--mesh", "dp=3,tp=4", "--set", f"way={way}", "--set", "odd=5", function="learns:build"
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdict is not None
    assert verdict.lead is not None
    assert list(verdict.lead.ranks) == [5]
    assert "were traced" not in verdict.summary  # all were


def test_that_torch_asks_which_gpu_there_is_is_no_read_of_the_program() -> None:
    """Dynamo does so on a machine with a GPU: one list of ranks was traced without, and all ranks with it."""
    with (
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch._C, "_cuda_getDevice", lambda: 0, create=True),
        watched_reads() as lines,
    ):
        assert device_interface.CudaInterface.Worker.current_device() == 0
        by_torch = list(lines)
        assert torch.cuda.current_device() == 0
    assert by_torch == []
    assert [line.function for line in lines] == ["test_that_torch_asks_which_gpu_there_is_is_no_read_of_the_program"]
