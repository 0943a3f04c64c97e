"""A verdict as it travels: the same after it, short at any number of ranks, and what a peer forged is refused."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Check, CheckId, Status, Verdict
from tpcompile.ranks.packed import PackedVerdict, packed

ADAPTER: TypeAdapter[Any] = TypeAdapter(PackedVerdict)


def verdict(ranks: range) -> Verdict:
    everyone = tuple(range(ranks[-1] + 1))
    check = Check(id=CheckId.ARRIVED, status=Status.FAIL, expected="all", observed="some", ranks=tuple(ranks))
    return Verdict(
        status=Status.FAIL, exit_code=ExitCode.FAIL, world_size=len(everyone), summary="some", checks=(check,),
        domains={"tp": (everyone,), "few": ((0, 2),)},
    )  # fmt: skip


def test_a_verdict_is_the_same_after_it_was_sent() -> None:
    sent = verdict(range(1, 4096, 4))
    assert ADAPTER.validate_python(packed(sent)) == sent
    assert ADAPTER.validate_python(sent.model_dump(mode="json")) == sent, "of a rank with an older version"


def test_its_length_does_not_grow_with_the_number_of_ranks() -> None:
    assert len(packed(verdict(range(1, 65536)))) < len(packed(verdict(range(1, 64)))) + 32


def forged(value: object) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


@pytest.mark.parametrize(
    "ranks", ["0-131071," * 100 + "0-131071", "0-", "x", "", "5-1 step", ["0-3"]], ids=lambda ranks: str(ranks)[:9]
)
def test_ranks_that_nobody_has_are_refused(ranks: object) -> None:
    data = verdict(range(1, 8)).model_dump(mode="json")
    data["domains"]["tp"] = [{"ranks": ranks}]
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(forged(data))


def test_many_lists_of_ranks_are_refused_together() -> None:
    data = verdict(range(1, 8)).model_dump(mode="json")
    data["domains"] = {str(number): [{"ranks": "0-131071"}] for number in range(40)}
    with pytest.raises(ValidationError, match="more than"):
        ADAPTER.validate_python(forged(data))
