"""Two groups of the same ranks are two groups: a rank that uses the other one is named, compiled or not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.sentinel.ranks import Ranks
from tests.sentinel.test_hang import by_rank, issued, line, state, stuck
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel import hang
from tpcompile.sentinel.messages import Issued, PointToPoint, RankState
from tpcompile.sentinel.situation import Situation
from tpcompile.sentinel.wrong_group import unlike_members, wrong_group
from tpcompile.torch_api import compiler as compat

ONE, TWO = "1 undefined", "2 undefined"
MEMBERS = {ONE: (0, 1), TWO: (0, 1), "0 default_pg": (0, 1, 2)}
Results = list[dict[str, dict[str, Any]]]


def waits_in(rank: int, group: str, *before: Issued, at: int = 10, **more: object) -> RankState:
    return state(
        rank, *before, issued_at(len(before) + 1, group, done=False, at=at), groups=(ONE, TWO), members=MEMBERS, **more
    )


def issued_at(seq: int, group: str, *, done: bool = True, at: int = 10) -> Issued:
    return issued(seq, done=done, group=group, at=at).model_copy(update={"stack": (line(at),)})


def test_ranks_that_wait_at_one_line_in_two_groups_of_the_same_ranks_use_different_groups() -> None:
    states = by_rank(waits_in(0, ONE), waits_in(1, TWO))
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.GROUP, (0, 1), line(10))
    waits = re.findall(r"rank (\d) waits in group '([\w ]+)'", found.observed)
    assert waits == [("0", "1 undefined"), ("1", "2 undefined")]


def test_a_rank_that_did_not_make_a_group_knows_the_next_one_by_its_number() -> None:
    """Ranks 0 and 1 made a group of their own first, and are about to make that of all three."""
    everyone = {**MEMBERS, ONE: (0, 1, 2)}
    waiting = state(2, issued_at(1, ONE, done=False), groups=(ONE,), members=everyone)
    making = [state(rank, issued_at(1, ONE), groups=(ONE,), members=MEMBERS) for rank in (0, 1)]
    found = stuck(by_rank(*making, waiting))
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.GROUP, (2,))
    assert unlike_members(Situation(ByRank(by_rank(*making)), before={}, lost=ByRank({}))) is None


def test_groups_of_one_name_without_a_common_rank_are_different_groups() -> None:
    """With local synchronization only the members make a group."""
    here = state(2, issued_at(1, ONE, done=False), groups=(ONE,), members={ONE: (2, 3)})
    others = [state(rank, issued_at(1, ONE), groups=(ONE,), members=MEMBERS) for rank in (0, 1)]
    assert stuck(by_rank(*others, here)) is None


def test_the_rank_that_used_the_other_group_before_is_named() -> None:
    states = by_rank(waits_in(0, ONE, issued_at(1, ONE)), waits_in(1, TWO, issued_at(1, ONE)))
    found = stuck(states)
    assert found is not None and found.ranks == (1,)


def test_a_rank_that_sets_up_its_other_group_waits_there_too() -> None:
    """A first collective of NCCL connects the ranks before the flight recorder records it."""
    place = (line(10),)
    states = by_rank(
        state(0, calling=ONE, stack=place, groups=(ONE, TWO), members=MEMBERS),
        state(1, calling=TWO, stack=place, groups=(ONE, TWO), members=MEMBERS),
    )
    found = stuck(states)
    assert found is not None and found.cause == Cause.GROUP
    assert stuck(states, before={}) is None
    receives = states[0].model_copy(update={"p2p": PointToPoint(op="recv", peer=1, line=line(10))})
    found = stuck({**states, 0: receives})
    assert found is None or found.cause != Cause.GROUP, "it waits for its peer, in whichever group"


def test_groups_of_other_ranks_and_other_lines_are_no_such_mistake() -> None:
    other_ranks = by_rank(waits_in(0, "0 default_pg"), waits_in(1, TWO))
    other_lines = by_rank(waits_in(0, ONE), waits_in(1, TWO, at=11))
    for states in (other_ranks, other_lines):
        found = stuck(states)
        assert found is None or found.cause != Cause.GROUP


@pytest.fixture
def groups_are_not_distinguished() -> None:
    """On this rank."""
    hang.FINDERS = tuple(find for find in hang.FINDERS if find is not wrong_group)
    roles = compat.group_roles
    compat.group_roles = lambda: {name: role.partition(" #")[0] for name, role in roles().items()}


def _two_groups() -> list[dist.ProcessGroup]:
    return [dist.new_group([0, 1]) for _ in range(2)]


def _eager() -> dict[str, Any]:
    """A loop in which rank 1 takes the other group once."""
    ranks, groups = Ranks(), _two_groups()
    with ranks.sentinel(policy="warn", hang_after_s=0.3) as sentinel:
        for number in range(3):
            odd = ranks.rank == 1 and number == 2
            work = dist.all_reduce(torch.ones(3), group=groups[odd], async_op=True)
            if number < 2:
                work.wait()
        sentinel.wait_for_finding(0)
        dist.all_reduce(torch.ones(3), group=groups[not odd])  # the policy goes on, and so must the ranks
        work.wait()
        lines = [check.line.code for verdict in sentinel.findings for check in verdict.checks if check.line]
    return ranks.summary(sentinel) | {"lines": lines}


def _compiled() -> dict[str, Any]:
    """The same in compiled code."""
    ranks, groups = Ranks(), _two_groups()
    group = groups[ranks.rank == 1]

    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", group) * 2

    compiled = torch.compile(step, backend="eager", dynamic=False)
    with ranks.sentinel(policy="warn", hang_after_s=0.3) as sentinel:
        work = dist.all_reduce(torch.ones(3), group=groups[ranks.rank == 0], async_op=True)
        compiled(torch.ones(3))
        work.wait()
        lines = [d.line.code for verdict in sentinel.findings for d in verdict.divergences if d.line]
    return ranks.summary(sentinel) | {"lines": lines}


@pytest.mark.tp(world_size=2, timeout_s=120)
def test_an_eager_collective_of_the_other_group_is_named_with_the_rank_and_the_line() -> None:
    found = _eager()
    ((cause, odd, _),) = found["checks"]
    assert (cause, odd) == (Cause.GROUP.value, (1,))
    assert found["lines"] == ["work = dist.all_reduce(torch.ones(3), group=groups[odd], async_op=True)"]


@pytest.mark.tp(world_size=2, timeout_s=120)
def test_compiled_code_that_communicates_over_the_other_group_is_named_with_the_line() -> None:
    found = _compiled()
    assert found["causes"] == [[Cause.GROUP.value]]
    assert found["lines"] == ['return funcol.all_reduce(x, "sum", group) * 2']


@pytest.mark.tp(world_size=2, timeout_s=120)
@pytest.mark.usefixtures("groups_are_not_distinguished")
def test_groups_that_are_not_distinguished_would_not_be_named() -> None:
    assert Cause.GROUP.value not in [cause for cause, _, _ in _eager()["checks"]]
    assert _compiled()["causes"] == []
