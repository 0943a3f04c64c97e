"""Three gloo ranks, of which one still compiles when another has passed: who did not compile is known all the same."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.sentinel import Sentinel, settle
from tpcompile.testing import run_on_ranks

pytestmark = [pytest.mark.timeout(180), pytest.mark.long]


_LONG_S = 60.0
"""However loaded the machine is."""
_is_told = threading.Event()
"""Set when this rank has a verdict."""


def _slow_on_rank_0(graph: Any, inputs: list[Tensor]) -> Any:
    """The same function on all ranks: what a closure holds is compared, too.

    The compile takes 3 s; where nobody waits for it, until there is a verdict, however loaded the machine is.
    """
    if dist.get_rank() == 0 and any(4 in tensor.shape for tensor in inputs):
        if settle._COME_S:
            time.sleep(3)
        else:
            _is_told.wait(60)
    return graph


def _worker(comes_s: float) -> list[tuple[int, ...]]:
    """Ranks 0 and 2 get a longer batch, which rank 0 compiles slowly; rank 1 does not."""
    rank = dist.get_rank()
    # Rank 2 is waited for in any case: of its compile, too, nothing is known before it has ended.
    settle._COME_S = comes_s if rank == 0 else _LONG_S  # type: ignore[misc]

    step = torch.compile(lambda x: x.sin() * 2, backend=_slow_on_rank_0, dynamic=False)
    with Sentinel(policy=lambda _: _is_told.set()) as sentinel:
        for number in range(8):
            step(torch.ones(3 if number < 5 or rank == 1 else 4))
            dist.all_reduce(torch.ones(1))
        sentinel.wait_for_finding(30)
    return [verdict.lead.ranks for verdict in sentinel.findings if verdict.lead is not None]


@pytest.mark.parametrize(("comes_s", "ranks"), [(_LONG_S, (1,)), (0.0, (2,))])
def test_a_rank_that_still_compiles_is_not_taken_for_one_that_never_did(comes_s: float, ranks: tuple[int, ...]) -> None:
    """Without the wait, the negative control, the rank that was fast is blamed."""
    assert run_on_ranks(_worker, comes_s, world_size=3, timeout_s=120) == [[ranks]] * 3
