"""What must be done before a process group ends is done, however the program ends it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import destroy_process_group as imported_before

from tpcompile.testing import run_on_ranks
from tpcompile.torch_api.teardown import before_shutdown


def seen_at_each_end() -> list[bool]:
    """Whether the default group still existed, at each call."""
    seen: list[bool] = []
    undo = before_shutdown(lambda: seen.append(dist.is_initialized()))
    pair = dist.new_group([0, 1])
    dist.barrier(pair)  # gloo connects on each rank: one that destroys its end at once cuts the other's connection
    dist.destroy_process_group(pair)
    imported_before()
    undo()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # which the end of a rank destroys
    return seen


def test_it_is_called_for_every_group_that_ends_while_groups_exist() -> None:
    assert run_on_ranks(seen_at_each_end) == [[True, True]] * 2
