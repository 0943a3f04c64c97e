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
from tpcompile.ranks.packed import PackedVerdict, compressed, expanded, packed

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
    lengths = [len(json.dumps(packed(verdict(range(1, size))))) for size in (64, 65536)]
    assert lengths[1] < lengths[0] + 64


@pytest.mark.parametrize(("num_lines", "at_most"), [(1, 35), (10_000, 3_000)])
def test_a_text_is_the_same_after_it_was_sent_and_a_long_one_is_short_on_the_way(num_lines: int, at_most: int) -> None:
    text = json.dumps({"stack": ["train.py:7 in stép"] * num_lines}, ensure_ascii=False)
    sent = compressed(text)
    assert expanded(sent.encode()).decode() == text
    assert len(sent) <= at_most


FORGED = {
    "9 MiB": base64.b64encode(zlib.compress(bytes(9 << 20))), "no zlib": base64.b64encode(b"none"), "no base64": b"!",
}  # fmt: skip


@pytest.mark.parametrize("text", FORGED)
def test_what_a_peer_forged_is_not_expanded(text: str) -> None:
    with pytest.raises(ValueError):
        expanded(b"zlib " + FORGED[text])


@pytest.mark.parametrize(
    "ranks", ["0-131071," * 100 + "0-131071", "0-", "x", "", "5-1 step", ["0-3"]], ids=lambda ranks: str(ranks)[:9]
)
def test_ranks_that_nobody_has_are_refused(ranks: object) -> None:
    data = verdict(range(1, 8)).model_dump(mode="json")
    data["domains"]["tp"] = [{"ranks": ranks}]
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(data)


def test_many_lists_of_ranks_are_refused_together() -> None:
    data = verdict(range(1, 8)).model_dump(mode="json")
    data["domains"] = {str(number): [{"ranks": "0-131071"}] for number in range(40)}
    with pytest.raises(ValidationError, match="more than"):
        ADAPTER.validate_python(data)
