"""How peers of a rank that raised end: after torchrun has seen that one end."""

from __future__ import annotations

import pytest

from tpcompile.ranks.liveness import Liveness
from tpcompile.sentinel import shutdown


@pytest.mark.parametrize(("last", "has_closed"), [("dead", False), ("unknown", True)])
def test_a_peer_gives_torchrun_a_second_to_notice(
    last: Liveness, has_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(shutdown.time, "sleep", slept.append)
    states: list[Liveness] = ["alive", last]
    shutdown.stay_until_gone(lambda: states.pop(0), lambda: has_closed)
    assert slept[-1] >= 1.0  # failures are dated by the second
    assert states == []
