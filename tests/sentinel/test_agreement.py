"""Chains of values by rank -> the first value that differs: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tpcompile.evidence.judgement import leading
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.agreement import Chain, Links, Span, Value, difference, first_span
from tpcompile.sentinel.checks import finding_check
from tpcompile.sentinel.finding import Finding

LINE = UserLine(file="train.py", line=7)


@dataclass(frozen=True)
class Said:
    """What one rank said: contents, or (name, content)."""

    contents: Sequence[str | tuple[str, str]]
    is_over: bool = False

    def chain(self) -> Chain:
        chain, calls = Chain(), dict[str, int]()
        for content in self.contents:
            name, bits = content if isinstance(content, tuple) else ("tokens", content)
            calls[name] = calls.get(name, 0) + 1
            chain.add(Value(name=name, call=calls[name], what="int64[4]", bits=bits, line=LINE))
        return chain


def found(*ranks: Said, num_members: int = 0) -> Finding | None:
    """What neighbours find who compare links, and then ask for the values."""
    chains = {rank: said.chain() for rank, said in enumerate(ranks)}
    links = {rank: chain.links(is_over=ranks[rank].is_over) for rank, chain in chains.items()}
    for rank in links:
        following = (rank + 1) % len(ranks)
        span = first_span({rank: links[rank], following: links[following]})
        if span is not None:
            values = {each: chain.values(span) for each, chain in chains.items()}
            nums = {each: one.num for each, one in links.items() if one.is_over}
            return difference(values, span, nums, num_members=num_members or len(ranks))
    return None


def differing(length: int, at: int) -> list[str]:
    """Contents that differ from those of the other ranks from one number on."""
    return [str(number) if number < at else f"other {number}" for number in range(1, length + 1)]


@pytest.mark.parametrize("length", [0, 1, 7, 100, 5000])
@pytest.mark.parametrize("behind", [0, 1, 30])
def test_equal_values_are_no_difference_however_far_apart_the_ranks_are(length: int, behind: int) -> None:
    ours = Said(differing(length, length + 1))
    assert found(ours, Said(ours.contents[: max(0, length - behind)])) is None


@pytest.mark.parametrize("length", [1, 9, 300, 3000])
@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("behind", [0, 5])
def test_the_first_value_that_differs_is_found(length: int, part: float, behind: int) -> None:
    at = 1 + int(part * (length - 1 - min(behind, length - 1)))
    same = differing(length + behind, length + behind + 1)
    finding = found(Said(same), Said(same[:length]), Said(differing(length, at)))
    assert finding is not None and finding.cause == Cause.AGREED_VALUES
    assert (finding.ranks, finding.is_rank_known, finding.line) == ((2,), True, LINE)
    assert f"(call {at})" in finding.observed


def test_a_finding_says_at_which_call_of_that_name_values_differ_and_so_does_a_verdict() -> None:
    ours = [("other", "1"), *differing(5, 9)]
    finding = found(Said(ours), Said([*ours[:4], "wrong", *ours[5:]]))
    assert finding is not None and finding.at_call == 4
    check = finding_check(finding)
    assert (check.at_call, leading.of_check(check).at_call) == (4, 4)


def test_of_two_ranks_neither_is_blamed() -> None:
    finding = found(Said(["1"]), Said(["2"]))
    assert finding is not None and (finding.ranks, finding.is_rank_known) == ((0, 1), False)


def test_a_majority_is_one_of_all_members_not_of_those_that_answered() -> None:
    finding = found(Said(["1"]), Said(["1"]), Said(["2"]), num_members=8)
    assert finding is not None and (finding.ranks, finding.is_rank_known) == ((0, 1, 2), False)


def test_calls_in_another_order_are_no_values_that_differ() -> None:
    ours = [("tokens", "1"), ("loss", "2"), ("tokens", "3")]
    finding = found(Said(ours), Said(ours), Said([ours[1], ours[0], ours[2]]))
    assert finding is not None and (finding.cause, finding.ranks) == (Cause.CALL_COUNT, (2,))


@pytest.mark.parametrize("lengths", [(10, 10, 8), (400, 400, 100), (10, 10, 0)])
def test_a_rank_that_ends_with_fewer_calls_is_named(lengths: tuple[int, ...]) -> None:
    finding = found(*(Said(differing(length, length + 1), is_over=True) for length in lengths))
    assert finding is not None and (finding.cause, finding.ranks) == (Cause.CALL_COUNT, (2,))
    assert finding.left_out == finding.line == LINE
    assert f"after {lengths[2]} calls" in finding.observed


def test_a_rank_that_is_behind_may_still_come() -> None:
    assert found(Said(differing(10, 11), is_over=True), Said(differing(8, 9))) is None


def test_a_call_that_only_one_rank_makes_is_blamed_on_it() -> None:
    finding = found(*(Said(differing(length, length + 1), is_over=True) for length in (11, 10, 10)))
    assert finding is not None and (finding.ranks, finding.left_out) == ((0,), None)


def test_what_is_sent_while_all_is_equal_does_not_grow_with_the_calls() -> None:
    sizes = [len(Said(differing(length, length + 1)).chain().links().to_json()) for length in (100, 10_000)]
    assert max(sizes) < 2000


def test_equal_contents_of_another_dtype_or_shape_differ() -> None:
    chains = [Chain(), Chain()]
    for chain, what in zip(chains, ("int64[4]", "int64[2, 2]"), strict=True):
        chain.add(Value(name="tokens", call=1, what=what, bits="1", line=LINE))
    assert first_span({rank: chain.links() for rank, chain in enumerate(chains)}) == Span(after=0, upto=1)
    assert first_span({0: Links(), 1: Links()}) is None
