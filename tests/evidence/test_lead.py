"""A finding in one line: what a person reads first."""

from __future__ import annotations

import pytest

from tests.evidence.samples import broken, compiled, only
from tpcompile.evidence import lead
from tpcompile.evidence.headline import spoken


def test_the_cause_is_said_once() -> None:
    found = lead.of_divergence(only(compiled(), compiled(breaks=(broken(at=4),))))
    assert lead.summary(found) == "graph break: print, on rank 1 only (rank 1) at /app/model.py:4 in forward"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("L['self']._modules['head']._parameters['weight']", "self.head.weight"),
        ("G['os'].environ._data[b'LOCAL_RANK']", "os.environ['LOCAL_RANK']"),
    ],
)
def test_a_source_is_written_as_the_user_would(source: str, says: str) -> None:
    assert spoken(source) == says
