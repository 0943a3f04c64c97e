"""Which ranks of a job are traced."""

from __future__ import annotations

import pytest

from tpcompile.dryrun.plan import Plan, ranks_of
from tpcompile.errors import ConfigError

AXES = (("dp", 8), ("tp", 4))


def test_a_sample_is_of_whole_groups() -> None:
    drawn = ranks_of(AXES, count=12, seed=3)
    assert len(drawn) == 12
    assert drawn[:4] == (0, 1, 2, 3)
    assert drawn[-4:] == (28, 29, 30, 31)
    (group,) = {rank // 4 for rank in drawn[4:-4]}
    assert drawn[4:-4] == tuple(range(4 * group, 4 * group + 4))


def test_a_seed_decides_which_groups_are_drawn() -> None:
    assert ranks_of(AXES, count=12, seed=3) == ranks_of(AXES, count=12, seed=3)
    assert len({ranks_of(AXES, count=12, seed=seed) for seed in range(20)}) > 1


@pytest.mark.parametrize(("count", "num_drawn"), [(2, 2), (3, 3), (4, 4), (5, 4), (6, 6), (31, 31), (32, 32), (99, 32)])
def test_no_rank_is_drawn_alone(count: int, num_drawn: int) -> None:
    assert len(ranks_of(AXES, count=count, seed=0)) == num_drawn


def test_part_of_a_group_has_its_last_rank_whose_shard_may_be_smaller() -> None:
    assert ranks_of((("tp", 8),), count=3, seed=0) == (0, 1, 7)


def test_groups_of_one_rank_are_drawn_in_pairs() -> None:
    assert len(ranks_of((("dp", 8), ("tp", 1)), count=4, seed=0)) == 4


def test_a_sample_of_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ranks 1"):
        ranks_of(AXES, count=1, seed=0)


def test_the_first_and_the_last_group_and_some_between_are_traced_in_any_case() -> None:
    plan = Plan(target="", axes=(("dp", 128), ("tp", 8)), ranks=tuple(range(1024)), seed=1)
    certain = [rank for rank in plan.ranks if plan.is_certain(rank)]
    assert {*range(8), *range(1016, 1024)} < set(certain)
    assert len(certain) <= 16 + 8


@pytest.mark.parametrize(
    ("axes", "count", "expected"),
    [
        ((("tp", 8),), 8, False),
        ((("dp", 2), ("tp", 4)), 8, False),
        ((("dp", 3), ("tp", 8)), 24, True),
        ((("dp", 2), ("tp", 4)), 4, False),
        (AXES, 12, True),
    ],
    ids=str,
)
def test_a_first_rank_is_watched_only_where_that_can_save_a_trace(
    axes: tuple[tuple[str, int], ...], count: int, expected: bool
) -> None:
    plan = Plan(target="", axes=axes, ranks=ranks_of(axes, count=count, seed=1), seed=1)
    assert plan.may_save() is expected
