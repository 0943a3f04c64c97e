"""A finding in one line: what a person reads first."""

from __future__ import annotations

import pytest

from tests.evidence.samples import broken, compiled, only
from tpcompile.evidence.judgement import leading as lead
from tpcompile.evidence.layers.row_text import spoken
from tpcompile.evidence.records import Check, CheckId, Status


def test_the_cause_is_printed_once() -> None:
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


def failed(id_: CheckId) -> Check:
    return Check(id=id_, mode="", status=Status.FAIL, expected="none", observed=id_.value)


def test_a_difference_explains_a_failed_check_unless_that_is_a_cause() -> None:
    divergence = only(compiled(), compiled(breaks=(broken(at=4),)))
    checks = [failed(CheckId.LAYER), failed(CheckId.REPORTED)]
    assert lead.of_run(checks, [divergence], causes={CheckId.REPORTED}) == lead.of_check(checks[1])
    assert lead.of_run(checks, [divergence], causes=()) == lead.of_divergence(divergence)
    assert lead.of_run(checks, [], causes=()) == lead.of_check(checks[0])
    assert lead.of_run([], [], causes=()) is None
