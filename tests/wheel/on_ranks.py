"""A user's test with the marker of the pytest plugin; the second fails on one rank."""

import pytest
import torch


@pytest.mark.tp(world_size=2)
def test_a_sum_over_ranks(tp):
    y = tp.check(lambda x: tp.comm.all_reduce(x * 2), torch.ones(4), backend="aot_eager")
    assert y.tolist() == [4.0] * 4


@pytest.mark.tp(world_size=2)
def test_that_is_red_on_rank_1(tp):
    assert tp.rank == 0
