"""Facts of ranks under an execution profile -> the checks of mode C that only a profile has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gate.test_checks import CONFIG, WRONG, error, errors, facts, failed, healthy, judge
from tpcompile.evidence.records import CheckId, RankRecord
from tpcompile.gate.measurements import Replays

GRAPHED = CONFIG.model_copy(update={"profile": "graphed"})
REPLAYED: dict[str, Any] = {
    "replays": Replays(captures=2, replays=15, calls=15),
    "errors": (*errors(), error("C", "replayed forward")),
}


def replayed(rank: int, **changes: Any) -> RankRecord:
    """A healthy rank under the profile `graphed`; a keyword replaces one of its facts."""
    return healthy(rank, facts=facts(**(REPLAYED | changes)))


def test_a_run_under_graphed_passes_with_its_replays() -> None:
    assert failed("C", replayed(0), replayed(1), config=GRAPHED) == {}
    found = judge("C", replayed(0), replayed(1), config=GRAPHED)
    assert found[CheckId.REPLAYS].observed == "15 of 15 calls, 2 CUDA graphs"
    assert CheckId.REPLAYS not in judge("C", healthy(0), healthy(1))


@pytest.mark.parametrize(
    "replays", [{"replays": 14}, {"captures": 3}, {"captures": 0, "replays": 0, "calls": 0}], ids=str
)
def test_calls_that_are_no_replays_fail(replays: dict[str, int]) -> None:
    broken_rank = replayed(1, replays=REPLAYED["replays"].model_copy(update=replays))
    assert failed("C", replayed(0), broken_rank, config=GRAPHED) == {CheckId.REPLAYS: (1,)}


def test_replays_that_differ_from_compiled_calls_or_were_not_compared_fail() -> None:
    stale = replayed(1, errors=(*errors(), error("C", "replayed forward", WRONG)))
    name = CheckId.REPLAYED
    assert failed("C", replayed(0), stale, config=GRAPHED) == {name: (1,)}
    assert failed("C", replayed(0), replayed(1, errors=errors()), config=GRAPHED) == {name: (1,)}
