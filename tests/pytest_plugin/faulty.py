"""Tests of a user that fail on ranks; run by tests/test_pytest_plugin.py as a session of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.pytest_plugin.fixture import TensorParallel

pytestmark = pytest.mark.tp(world_size=2)
FAST = {"backend": "eager"}


def test_rank_constant(tp: TensorParallel) -> None:
    def block(x: Tensor) -> Tensor:
        return tp.comm.all_reduce(x * (dist.get_rank() + 1))  # line: rank constant

    tp.check(block, torch.ones(4), **FAST)


def test_break_on_one_rank(tp: TensorParallel) -> None:
    is_odd = tp.rank == 1  # line: break

    def block(x: Tensor) -> Tensor:
        if is_odd:
            torch._dynamo.graph_break()
        return x + 1

    tp.check(block, torch.ones(4), **FAST)


def test_dtype(tp: TensorParallel) -> None:
    dtype = torch.float64 if tp.rank == 1 else torch.float32  # line: dtype
    tp.check(lambda x: x.sin(), torch.ones(4, dtype=dtype), **FAST)


def test_missing_collective(tp: TensorParallel) -> None:
    is_odd = tp.rank == 1  # line: missing

    def block(x: Tensor) -> Tensor:
        return x * 2 if is_odd else tp.comm.all_reduce(x * 2)

    tp.check(block, torch.ones(4), **FAST)


def test_layout(tp: TensorParallel) -> None:
    is_odd = tp.rank == 1  # line: layout

    def block(x: Tensor) -> Tensor:
        if is_odd:
            x = x.t().contiguous().t()
        return tp.comm.all_reduce(x * 2)

    tp.check(block, torch.ones(4, 4), **FAST)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # line: recompile
        return x * self.count


def test_recompile(tp: TensorParallel) -> None:
    tp.check(Counting(), torch.ones(4), **FAST)


def test_breaks(tp: TensorParallel) -> None:
    def block(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()  # line: breaks
        return y.cos()

    tp.check(block, torch.ones(4), **FAST)


def test_fewer_breaks_than_expected(tp: TensorParallel) -> None:
    tp.expect(graphs=1, breaks=1)
    tp.check(lambda x: x.sin(), torch.ones(4), **FAST)


def test_assertion_on_one_rank(tp: TensorParallel) -> None:
    print(f"printed by rank {tp.rank}")
    assert tp.rank == 0  # line: one rank


def test_assertion_on_all_ranks(tp: TensorParallel) -> None:
    assert tp.rank == 5  # line: all ranks


def test_two_causes(tp: TensorParallel) -> None:
    if tp.rank == 0:
        raise ValueError("the cause on rank 0")
    raise KeyError("the cause on rank 1")


def test_raises_while_the_other_waits(tp: TensorParallel) -> None:
    if tp.rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(1))  # line: waits


def test_dies(tp: TensorParallel) -> None:
    if tp.rank == 1:
        os.write(2, b"last words of rank 1\n")
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def test_is_killed(tp: TensorParallel) -> None:
    if tp.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)  # line: killed
    dist.all_reduce(torch.ones(1))


@pytest.mark.timeout(3)
def test_hangs(tp: TensorParallel) -> None:
    if tp.rank == 1:
        time.sleep(600)  # line: sleeps
    dist.all_reduce(torch.ones(1))  # line: hangs


@pytest.mark.timeout(3)
def test_waits_in_different_collectives(tp: TensorParallel) -> None:
    if tp.rank == 0:
        dist.all_reduce(torch.ones(1))  # line: only rank 0
    dist.barrier()  # line: barrier


@pytest.fixture
def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted in a fixture")


def test_fixture(fails_on_rank_1: None) -> None:
    pass


@pytest.fixture
def fails_at_its_end() -> Iterator[None]:
    yield
    assert dist.get_rank() == 0, "planted in the end of a fixture"


def test_end_of_a_fixture(fails_at_its_end: None) -> None:
    pass


def test_breakpoint() -> None:
    breakpoint()
