"""A captured program of the user's own -> one verdict on all ranks of a mesh axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.capture import CaptureSession
from tpcompile.errors import DivergenceError
from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.judgement.verdict import capture_rules
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.ranks.exchange import Exchange
from tpcompile.ranks.recorded import record_side
from tpcompile.ranks.store import RankStore

_NUMBERS = itertools.count()
_LEAVING_S = 20.0
"""Rank 0, which serves the store of a job that torchrun did not start, waits so long for ranks that still read."""


class _Unseen:
    """A rank that does not answer, where no rank publishes its state."""

    def last_seen(self, rank: int) -> str:
        """Not known."""
        return "unknown"

    def is_gone(self, rank: int) -> bool:
        """Always False: the process of a rank is not known."""
        return False


def check_ranks(
    session: CaptureSession,
    *,
    mesh: DeviceMesh,
    axis: str = "tp",
    timeout_s: float = 300.0,
    allowed: Allowed = (),
    tp_aware: Iterable[str] = (),
    store: dist.Store | None = None,
) -> Verdict:
    """Compare what all ranks captured; every rank calls it, every rank gets the verdict.

    Ranks of one group of `axis` must agree; groups are compared apart. `allowed` lists intended differences as
    (layer, text, reason), `tp_aware` custom ops and Triton kernels declared safe. Talks through `store`, by default
    a client of its own at MASTER_ADDR:MASTER_PORT; no collective. Raises DivergenceError when the judging rank falls
    silent; a rank that does not call within `timeout_s` is a failed check with its number.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    members = dist.get_process_group_ranks(mesh.get_group(axis))
    record = session.record(
        rank=rank,
        world_size=world_size,
        domain=f"{axis} {ranks_text(members)}",
        coordinate=mesh.get_local_rank(axis),
        tp_size=len(members),
        tp_aware=tp_aware,
    )
    client = RankStore.of_job(f"tpcompile/check/{next(_NUMBERS)}", store)
    side = record_side(record, capture_rules(timeout_s=timeout_s, allowed=allowed))
    verdict = Exchange(client, range(world_size), others=_Unseen(), timeout_s=timeout_s).verdict(side)
    client.leave_together(timeout_s=min(timeout_s, _LEAVING_S))
    if verdict is None:
        raise DivergenceError(f"rank {rank} got no verdict within {timeout_s:g} s; the judging rank stopped responding")
    return verdict
