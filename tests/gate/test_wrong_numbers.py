"""In what the ranks of a target with wrong numbers differ: the inputs, the reference, or neither."""

from __future__ import annotations

import math

import pytest
import torch

from tests.evidence.samples import record
from tpcompile.choices import TARGET
from tpcompile.config import load_target
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.checks import digests_by_rank
from tpcompile.evidence.records import Check, CheckId, RankRecord, Status
from tpcompile.gate import checks, wrong_numbers
from tpcompile.gate.measurements import Declared, GateFacts, TensorError
from tpcompile.gate.outputs import norms, values_of

INPUTS = "the values of the inputs differ between ranks"
REFERENCE = "the reference returns different values"
PROGRAM = "no difference between the ranks was seen in inputs or reference"


def rank(
    number: int, *, inputs: str = "a", reference: float = 2.0, domain: str = "tp", ratio: float = 9.0
) -> RankRecord:
    """A rank with an error of the forward."""
    errors = [
        TensorError(mode=TARGET, what=what, error=1e-7, single=1e-7, ratio=value)
        for what, value in {"forward": ratio, "eager forward": 1.0}.items()
    ]
    facts = GateFacts(
        declared=Declared(has_reference=True), errors=errors, inputs=(inputs,), reference=(reference, 1.0)
    )
    return record(number, facts=facts.model_dump(mode="json"), domain=domain)


def differing(*ranks: RankRecord) -> str:
    return wrong_numbers.differing(digests_by_rank([digest_rank(one) for one in ranks]))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"inputs": "b", "reference": 3.0}, f"{INPUTS}: rank 0 | rank 1"),
        ({"reference": 2.001}, REFERENCE),
        ({"reference": 2.0 + 1e-13}, PROGRAM),
        ({"reference": math.nan}, PROGRAM),
        ({"inputs": "b", "domain": "tp 1"}, PROGRAM),
    ],
    ids=["inputs", "reference", "rounding", "nan", "different groups"],
)
def test_the_first_thing_that_differs_is_named(other: dict[str, object], says: str) -> None:
    assert differing(rank(0), rank(1, **other)).startswith(says)  # type: ignore[arg-type]


def forward_right(*ranks: RankRecord) -> Check:
    config, digests = load_target("theirs:build"), [digest_rank(one) for one in ranks]
    (found,) = [check for check in checks.target(config, digests, ()) if check.id == CheckId.FORWARD]
    return found


def test_a_red_forward_says_it_first() -> None:
    found = forward_right(rank(0), rank(1))
    assert found.status == Status.FAIL
    assert found.details[0] == PROGRAM


def test_a_green_one_says_nothing() -> None:
    found = forward_right(rank(0, ratio=1.0), rank(1, ratio=1.0, inputs="b"))
    assert (found.status, found.details) == (Status.PASS, ())


def test_values_are_told_apart_bit_by_bit_and_norms_up_to_rounding() -> None:
    x, ids = torch.randn(4, 8), torch.arange(4)
    assert values_of((x, ids)) == values_of({"x": x.clone(), "ids": ids})
    assert values_of((x, ids)) != values_of((x, ids + 1))
    assert values_of((x.to_sparse(), 3)) == ("unknown",)
    assert norms({"forward": torch.full((4,), 2.0)}) == (4.0,)
