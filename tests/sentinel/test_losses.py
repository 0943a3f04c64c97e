"""Communication failed on a rank because a peer aborted: the ranks that live are asked before any is blamed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sentinel.test_hang import issued, line, state
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel import exception_cause
from tpcompile.sentinel.asking import Asking, Limits
from tpcompile.sentinel.events import Absence
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.progress import Progress

HERE = state(1, issued(1), issued(2, at=69), issued(3), issued(4, at=69))
"""It came to line 69 as the rank that aborted there did."""


def finding(monkeypatch: pytest.MonkeyPatch, *others: RankState) -> Finding:
    """What rank 1 of three finds, of which rank 2 aborted at line 69 and the others answer."""
    answers = {other.rank: other for other in others}
    dead = Absence("dead", (line(69),), aborted=True)

    def absences(_: Any, ranks: Collection[int]) -> dict[int, Absence]:
        return {rank: dead if rank == 2 else Absence("running") for rank in sorted(ranks)}

    def ask(ranks: Sequence[int], *, timeout_s: float) -> dict[int, RankState]:
        assert timeout_s > 0 and 1 not in ranks, "this rank would wait for its own answer"
        return {rank: answers[rank] for rank in ranks if rank in answers}

    monkeypatch.setattr(exception_cause, "absences", absences)
    log: Any = SimpleNamespace(members=(0, 1, 2), rank=1, ask=ask)
    asking = Asking(1, Limits(), Progress(lambda _: None))
    protocol: Any = SimpleNamespace(left={}, asking=asking)
    snapshot: Any = SimpleNamespace(state=lambda: HERE)
    found = exception_cause.Losses(log, protocol, snapshot).behind(RuntimeError("Connection closed by peer"), line(69))
    assert found is not None
    return found


def test_a_rank_that_lives_and_did_something_else_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(monkeypatch, state(0, issued(1), issued(2, at=69), issued(3), issued(4, done=False, at=45)))
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(45))
    assert found.gone == (2,)


def test_where_all_that_live_did_the_same_the_sizes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(monkeypatch, HERE.model_copy(update={"rank": 0}))
    assert (found.cause, found.ranks) == (Cause.COLLECTIVE_SIZES, (2,))
