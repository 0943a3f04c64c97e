"""Which compiled variant each rank ran: the call and the rank that differ."""

from __future__ import annotations

from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.variants import Ran, wrong_variant


def ran(text: str, *, first: int = 1) -> dict[str, Ran]:
    return {"step train.py:3": Ran(region="step train.py:3", variants=dict(enumerate(text, first)))}


def test_ranks_that_ran_the_same_are_left_alone() -> None:
    assert wrong_variant({0: ran("aabba"), 1: ran("aabb")}) is None


def test_of_two_ranks_the_one_that_ran_the_rarer_variant_is_named_with_the_call() -> None:
    for odd in (0, 1):
        programs = {rank: ran("abaaaba" if rank == odd else "abaaaaa") for rank in (0, 1)}
        found = wrong_variant(programs)
        assert found is not None
        assert (found.cause, found.ranks) == (Cause.WRONG_VARIANT, (odd,))
        assert "in call 6" in found.observed


def test_of_three_ranks_the_one_that_ran_something_else_is_named() -> None:
    found = wrong_variant({0: ran("ab"), 1: ran("ab"), 2: ran("ba")})
    assert found is not None and found.ranks == (2,)


def test_a_variant_that_only_one_rank_has_is_a_recompile_and_not_this() -> None:
    assert wrong_variant({0: ran("aac"), 1: ran("aab")}) is None


def test_a_rank_that_runs_one_of_several_callables_without_compiling_it_is_named() -> None:
    """Three layers: the first without a gradient on its input, the others with one; rank 1 has compiled two of them."""

    def layers(text: str, number: int) -> dict[str, Ran]:
        of_region = ran(text)["step train.py:3"]
        return {of_region.region: of_region.model_copy(update={"first_calls": tuple(range(1, number + 1))})}

    found = wrong_variant({0: layers("abbabb", 3), 1: layers("ababab", 2)})
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.COMPILE_DISABLED, (1,))
    assert "rank 0 3, rank 1 2" in found.observed
    alike = wrong_variant({0: layers("abbabb", 3), 1: layers("aababb", 3)})
    assert alike is not None and alike.cause == Cause.WRONG_VARIANT


def test_only_calls_that_both_ranks_made_are_compared() -> None:
    assert wrong_variant({0: ran("aaaa"), 1: ran("bbba", first=4)}) is None
