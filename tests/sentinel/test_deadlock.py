"""Rings of waits over all domains: each is found with its ranks, and a rank that may move breaks it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.sentinel.test_hang import issued, line
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.asking import Asking, Limits
from tpcompile.sentinel.deadlock import Deadlock, Seen, ring_of, waits_among
from tpcompile.sentinel.events import Answers
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import COMPILING, RUNNING, WAITING, Issued, PointToPoint, Position, RankState
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.progress import Progress

WORLD = "0 default_pg"
DOMAINS = ((0, 1), (2, 3))
DP = {0: "1 mesh_dp", 1: "2 mesh_dp", 2: "1 mesh_dp", 3: "2 mesh_dp"}
TP = {0: "3 mesh_tp", 1: "3 mesh_tp", 2: "4 mesh_tp", 3: "4 mesh_tp"}
MEMBERS = {
    WORLD: (0, 1, 2, 3), "1 mesh_dp": (0, 2), "2 mesh_dp": (1, 3), "3 mesh_tp": (0, 1), "4 mesh_tp": (2, 3),
}  # fmt: skip


def rank_at(rank: int, *collectives: Issued, blocked: bool = True, **more: object) -> RankState:
    groups = (WORLD, DP[rank], TP[rank])
    fields = {"activity": RUNNING, "since_s": 4.0, "groups": groups, "blocked": blocked, "stack": (line(20 + rank),)}
    return RankState.model_validate(
        {"rank": rank, "issued": collectives, "members": {name: MEMBERS[name] for name in groups}, **fields, **more}
    )


def waits_in(group: str, seq: int = 1, *, op: str = "all_reduce", at: int = 10, age_s: float = 4.0) -> Issued:
    return issued(seq, done=False, op=op, at=at, group=group).model_copy(update={"age_s": age_s})


def done_in(group: str, seq: int = 1, *, op: str = "all_reduce", at: int = 10, age_s: float = 9.0) -> Issued:
    return issued(seq, op=op, at=at, group=group).model_copy(update={"age_s": age_s})


def peer(op: str, other: int, at: int = 40) -> PointToPoint:
    return PointToPoint(op=op, peer=other, line=line(at))


def seen(*states: RankState, number: int = 1) -> ByRank[Seen]:
    made = (Seen(state=one, number=number, domain=(0, 1) if one.rank < 2 else (2, 3)) for one in states)
    return ByRank({one.state.rank: one for one in made})


def ring(*states: RankState) -> list[int]:
    return sorted(wait.rank for wait in ring_of(waits_among(seen(*states))))


def found(*states: RankState) -> Finding | None:
    """The finding when nothing moves."""
    deadlock = Deadlock()
    for number in (1, 2):
        assert deadlock.find(seen(*states, number=number)) is None
    return deadlock.find(seen(*states, number=3))


def barrier_too_early() -> list[RankState]:
    """Rank 2 calls a barrier of all ranks before its all-reduce over dp; the others do it afterwards."""
    barrier = waits_in(WORLD, op="barrier", at=60)
    step = {rank: done_in(TP[rank]) for rank in range(4)}
    return [
        rank_at(0, step[0], waits_in(DP[0], at=105)),
        rank_at(1, step[1], done_in(DP[1], at=105, age_s=5.0), barrier),
        rank_at(2, step[2], barrier),
        rank_at(3, step[3], done_in(DP[3], at=105, age_s=5.0), barrier),
    ]


def pipeline(*, first_stage: RankState | None = None) -> list[RankState]:
    """Stages 0-1 and 2-3: rank 1 sends to rank 2, which waits in its stage for rank 3, which receives from rank 1."""
    return [
        rank_at(0, waits_in(TP[0], seq=3)),
        first_stage or rank_at(1, p2p=peer("send", 2)),
        rank_at(2, waits_in(TP[2], seq=2)),
        rank_at(3, p2p=peer("recv", 1, at=28)),
    ]


def test_ranks_of_two_domains_that_wait_for_each_other_are_a_deadlock() -> None:
    finding = found(*barrier_too_early())
    assert finding is not None
    assert (finding.cause, finding.ranks, finding.line) == (Cause.STUCK_COLLECTIVE, (2,), line(60))
    assert "ranks 0-1,3 issued all_reduce" in finding.observed
    waits = re.findall(r"rank (\d) waits in (\w+)", finding.observed)
    assert ("0", "all_reduce") in waits and ("2", "barrier") in waits
    assert len(finding.details) == 4


def test_a_ring_of_sends_and_receives_and_collectives_is_a_deadlock_without_a_rank_to_blame() -> None:
    finding = found(*pipeline())
    assert finding is not None
    assert finding.ranks == (1, 2, 3)
    for says in ("rank 1 waits in send to rank 2", "rank 2 waits in all_reduce", "rank 3 waits in recv from rank 1"):
        assert says in finding.observed


@pytest.mark.parametrize(
    "moves",
    [
        rank_at(1, blocked=False),
        rank_at(1, p2p=peer("send", 2), activity=COMPILING, in_dynamo=True),
        rank_at(1, waits_in(DP[1]), blocked=False),
        rank_at(1, p2p=peer("send", 2), ended="finished"),
    ],
    ids=["own code", "compiles", "only its GPU waits", "has left"],
)
def test_a_rank_that_may_move_breaks_the_ring(moves: RankState) -> None:
    assert found(*pipeline(first_stage=moves)) is None


def test_a_slow_first_stage_keeps_the_stages_after_it_waiting() -> None:
    """As rank 0 that reads data: its peer waits in a collective, the next stage in receives."""
    slow = rank_at(0, blocked=False)
    receives = [rank_at(2, p2p=peer("recv", 0), calling=WORLD), rank_at(3, p2p=peer("recv", 1), calling=WORLD)]
    assert found(slow, rank_at(1, waits_in(TP[1])), *receives) is None


def test_a_receive_names_a_group_but_waits_for_its_peer_only() -> None:
    """Rank 2 receives from rank 0, and rank 3 waits for rank 2: rank 2 does not wait for rank 3."""
    receives = rank_at(2, p2p=peer("recv", 0), calling=WORLD)
    assert ring(rank_at(0, blocked=False), receives, rank_at(3, waits_in(TP[3]))) == []


def test_a_rank_that_has_issued_what_is_waited_for_is_no_part_of_a_ring() -> None:
    """The snapshot of rank 2 is older: it will find that rank 0 has issued the collective."""
    assert ring(rank_at(0, done_in(DP[0]), waits_in(TP[0], 2)), rank_at(2, waits_in(DP[2]))) == []


@pytest.mark.parametrize("more", [{"p2p": peer("recv", 1)}, {"calling": TP[0]}, {}], ids=["receives", "tp", "unknown"])
def test_a_collective_in_flight_while_the_rank_waits_for_a_different_one_is_no_wait(more: dict[str, object]) -> None:
    """Rank 0 left an all-reduce over dp in flight, and waits for rank 1, which runs its own code."""
    asynchronous = [waits_in(DP[0], age_s=8.0), *([] if "p2p" in more else [waits_in(TP[0], 2)])]
    states = rank_at(0, *asynchronous, **more), rank_at(2, waits_in(WORLD, op="barrier"))
    assert ring(*states, rank_at(1, blocked=False)) == []
    assert ring(*states) == [], "rank 1 has published nothing"


def test_a_ring_counts_once_every_rank_answered_again_without_having_moved() -> None:
    deadlock, states = Deadlock(), barrier_too_early()
    for number in (1, 2):
        assert deadlock.find(seen(*states, number=number)) is None
    moved = [*states[:3], rank_at(3, blocked=False)]
    old = {**seen(*states, number=3), **seen(*moved[:2], number=9)}
    assert deadlock.find(ByRank({**old, 2: seen(states[2], number=2)[2]})) is None, "rank 2 has not answered again"
    elsewhere = states[0].model_copy(update={"stack": (line(999),)})
    assert deadlock.find(seen(elsewhere, *states[1:], number=9)) is None, "rank 0 moved"


def test_a_ring_in_which_a_rank_receives_once_more_at_the_same_line_is_a_new_one() -> None:
    def after(calls: int, number: int) -> ByRank[Seen]:
        return seen(*pipeline(first_stage=rank_at(1, p2p=peer("send", 2), calls={"f": calls})), number=number)

    deadlock = Deadlock()
    assert not any(deadlock.find(after(calls, number)) for calls, number in ((1, 1), (2, 3), (3, 5), (4, 7)))


def test_a_rank_that_has_compiled_waits_only_for_its_own_domain() -> None:
    here = Position(region="f", call=4, index=0)
    held = rank_at(0, waits_at=here, activity=WAITING, blocked=False)
    assert ring(held, rank_at(1, waits_in(DP[1])), rank_at(3, waits_in(TP[3])), rank_at(2, waits_in(DP[2]))) == [
        0, 1, 2, 3,
    ]  # fmt: skip
    assert ring(held, rank_at(1, blocked=False), rank_at(2, waits_in(DP[2]))) == []


def wrong_group() -> list[RankState]:
    """Rank 1 reduces over tp where the others reduce over dp."""
    barrier = waits_in(WORLD, op="barrier", at=60, age_s=3.0)
    return [
        rank_at(0, done_in(TP[0]), done_in(DP[0], at=101, age_s=5.0), barrier),
        rank_at(1, done_in(TP[1]), waits_in(TP[1], 2, at=101)),
        rank_at(2, done_in(TP[2]), done_in(DP[2], at=101, age_s=5.0), barrier),
        rank_at(3, done_in(TP[3]), waits_in(DP[3], at=101)),
    ]


def one_sided_barrier() -> list[RankState]:
    """Only rank 0 calls the barrier; the others are in the next step."""
    before = {rank: (done_in(TP[rank]), done_in(DP[rank], at=101, age_s=5.0)) for rank in range(4)}
    others = [rank_at(rank, *before[rank], waits_in(TP[rank], 2)) for rank in (1, 2, 3)]
    others[1:] = [
        rank_at(rank, *before[rank], done_in(TP[rank], 2, age_s=4.0), waits_in(DP[rank], 2, at=101, age_s=3.0))
        for rank in (2, 3)
    ]
    return [rank_at(0, *before[0], waits_in(WORLD, op="barrier", at=60)), *others]


@pytest.mark.parametrize(("states", "odd", "at"), [(wrong_group(), 1, 101), (one_sided_barrier(), 0, 60)])
def test_the_rank_that_did_what_three_others_did_not_is_named_by_its_own_domain(
    states: Sequence[RankState], odd: int, at: int
) -> None:
    """Both ranks of the domain wait for each other; only the other domain shows which of them left the order."""
    everyone = seen(*states)
    beside = {rank: everyone[rank] for rank in (2, 3)}
    asking = Asking(0, Limits(), Progress(lambda found: None))
    here = {rank: states[rank] for rank in (0, 1)}
    answers = [Answers(float(number), here, {}, beside) for number in range(2)]
    assert asking.why_stuck(answers[0]) is None
    finding = asking.why_stuck(answers[1])
    assert finding is not None
    assert (finding.ranks, finding.line) == ((odd,), line(at))


def test_stages_with_programs_of_their_own_blame_no_rank() -> None:
    """Three stages of one rank issue what the fourth never does; all continued after that difference."""
    states = pipeline()
    more = [rank_at(0, done_in(WORLD, op="all_gather"), waits_in(TP[0], 3)), *states[1:]]
    finding = found(*more)
    assert finding is not None
    assert finding.ranks == (1, 2, 3)


@pytest.mark.parametrize("fewer", [2, 3])
def test_of_two_ranks_that_parted_in_the_first_step_none_is_blamed(fewer: int) -> None:
    """One of them is in the backward where the other is in one more forward: either may be wrong."""
    more = 5 - fewer
    parted = [
        rank_at(more, done_in(TP[2], 1, at=22), done_in(TP[2], 2, at=22), waits_in(TP[2], 3, at=44)),
        rank_at(fewer, done_in(TP[2], 1, at=22), done_in(TP[2], 2, at=44), p2p=peer("send", 1, at=46)),
    ]
    finding = found(rank_at(0, p2p=peer("recv", 2)), rank_at(1, p2p=peer("send", fewer)), *parted)
    assert finding is not None
    assert finding.ranks == (2, 3)
    assert "train.py:22" in finding.observed and "train.py:44" in finding.observed


def micro_batches(*, step: int, last: int) -> list[Issued]:
    """Collectives of a stage: in each step the forward of some micro batches, then as many backwards."""
    lines = ([22] * step + [44] * step) * 2 + [22] * last + [44]
    return [done_in(TP[2], seq, at=at, age_s=90.0 - seq) for seq, at in enumerate(lines, 1)]


@pytest.mark.parametrize("odd", [2, 3])
@pytest.mark.parametrize("last", [1, 3], ids=["one fewer", "one more"])
def test_a_rank_whose_loop_runs_unlike_in_its_earlier_steps_is_named(odd: int, last: int) -> None:
    usual, unusual = micro_batches(step=2, last=2), micro_batches(step=2, last=last)
    parted = [rank_at(5 - odd, *usual, waits_in(TP[2], 90)), rank_at(odd, *unusual, p2p=peer("send", 1))]
    finding = found(rank_at(0, p2p=peer("recv", 2)), rank_at(1, p2p=peer("send", odd)), *parted)
    assert finding is not None
    assert finding.ranks == (odd,)


def test_a_loop_that_ends_for_the_first_time_is_no_deviation() -> None:
    """Rank 3 runs one micro batch more than rank 2, or rank 2 one fewer."""
    parted = [
        rank_at(2, *micro_batches(step=0, last=3)[:4], waits_in(TP[2], 5, at=44)),
        rank_at(3, *micro_batches(step=0, last=4)[:4], p2p=peer("send", 1)),
    ]
    finding = found(rank_at(0, p2p=peer("recv", 2)), rank_at(1, p2p=peer("send", 3)), *parted)
    assert finding is not None
    assert finding.ranks == (2, 3)


def test_lines_of_stages_that_run_programs_of_their_own_are_not_compared() -> None:
    """Stages log over all ranks, each from its own line."""
    logs = [done_in(WORLD, at=100 + rank // 2, age_s=12.0) for rank in range(4)]
    stages = [one.model_copy(update={"issued": (logs[one.rank], *one.issued)}) for one in pipeline()]
    finding = found(*stages)
    assert finding is not None
    assert finding.ranks == (1, 2, 3)


def four_of_which(odd: Sequence[int], other: Issued, *more: Issued) -> dict[int, RankState]:
    """Four ranks in an all-reduce of all ranks, `odd` ones in or after something else."""
    usual = waits_in(WORLD)
    return {rank: rank_at(rank, *((other, *more) if rank in odd else (usual,))) for rank in range(4)}


def test_one_of_four_ranks_that_waits_in_a_different_collective_left_the_order() -> None:
    finding = parted(four_of_which([3], waits_in(WORLD, op="barrier", at=60)), domains=DOMAINS)
    assert finding is not None and (finding.ranks, finding.line) == ((3,), line(60))


def test_half_of_the_ranks_are_no_majority() -> None:
    finding = parted(four_of_which([2, 3], waits_in(WORLD, op="barrier", at=60)), domains=DOMAINS)
    assert finding is not None and not finding.is_rank_known


def test_a_rank_that_continued_after_the_difference_did_not_leave_the_order() -> None:
    """As a stage of a pipeline that runs a program of its own."""
    ops = ("all_reduce", "all_reduce", "all_reduce", "all_gather")
    stages = [
        rank_at(rank, done_in(f"{rank + 5} mesh_tp", op=op), waits_in(WORLD, at=60)).model_copy(
            update={"members": {WORLD: MEMBERS[WORLD], f"{rank + 5} mesh_tp": (rank,)}}
        )
        for rank, op in enumerate(ops)
    ]
    each_alone = [(rank,) for rank in range(4)]
    assert parted({one.rank: one for one in stages}, domains=each_alone) is None
    stopped = [*stages[:3], stages[3].model_copy(update={"issued": (waits_in("8 mesh_tp", op="all_gather", at=61),)})]
    finding = parted({one.rank: one for one in stopped}, domains=each_alone)
    assert finding is not None and finding.ranks == (3,)
