"""States of all ranks -> why nothing moves: each reason, and each wait that may still end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.describe import describe
from tpcompile.sentinel.exited_ranks import lost_to_exited
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.hang import why_stuck
from tpcompile.sentinel.messages import (
    COMPILING,
    FINISHED,
    RUNNING,
    WAITING,
    Issued,
    Message,
    PointToPoint,
    Position,
    RankState,
)
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.situation import Lost, Situation

GROUP = "0 default_pg"
AT = Position(region="f", call=4, index=0)


def line(number: int) -> UserLine:
    return UserLine(file="/home/me/train.py", line=number, function="step")


def issued(seq: int, *, done: bool = True, op: str = "all_reduce", at: int = 10, group: str = GROUP) -> Issued:
    return Issued(group=group, seq=seq, op=op, sizes="4x4", dtypes="Float", is_done=done, age_s=4.0, stack=(line(at),))


def state(rank: int, *collectives: Issued, **more: object) -> RankState:
    fields: dict[str, Any] = {"activity": RUNNING, "since_s": 4.0, "groups": (GROUP,), "stack": (line(20 + rank),)}
    fields |= more
    fields = {"members": dict.fromkeys(fields["groups"], tuple(range(5)))} | fields
    return RankState.model_validate({"rank": rank, "issued": collectives, **fields})


def by_rank(*states: RankState) -> dict[int, RankState]:
    return {s.rank: s for s in states}


def stuck(
    now: Mapping[int, RankState],
    *lost: Lost,
    before: Mapping[int, RankState] | None = None,
    other_domains: Mapping[int, RankState] | None = None,
) -> Finding | None:
    """Why no rank progresses; by default no rank has progressed since the previous round."""
    return why_stuck(
        Situation(
            ByRank(now), now if before is None else before, ByRank({one.rank: one for one in lost}), other_domains or {}
        )
    )


def test_a_rank_that_compiles_may_come() -> None:
    states = by_rank(state(0, issued(1, done=False)), state(1, activity=COMPILING, in_dynamo=True, compile_id="0/1"))
    assert stuck(states) is None


def test_a_rank_in_its_own_code_may_come() -> None:
    states = by_rank(state(0, issued(1, done=False)), state(1))
    assert stuck(states) is None


def test_one_round_is_not_enough_to_call_a_rank_stuck() -> None:
    states = by_rank(state(0, waits_at=AT, activity=WAITING), state(1, issued(1, done=False)))
    assert stuck(states, before={}) is None
    assert stuck(states) is not None


def test_a_rank_that_moved_since_the_last_round_is_not_stuck() -> None:
    before = by_rank(state(0, waits_at=AT), state(1, issued(1, done=False)))
    now = by_rank(state(0, waits_at=AT), state(1, issued(1), issued(2, done=False)))
    assert stuck(now, before=before) is None


def test_a_rank_that_never_compiled_is_named_with_the_collective_it_waits_in() -> None:
    states = by_rank(state(0, waits_at=AT, activity=WAITING), state(1, issued(1, done=False, at=12)))
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.COMPILE_DISABLED, (1,), line(12))
    assert "rank 0 compiled call 4 of f" in found.observed


def test_a_missed_guard_without_a_compile_is_the_recompile_limit() -> None:
    here = Position(region="f", call=4, index=0)
    missed = state(1, issued(1, done=False), position=here, reason="size mismatch")
    states = by_rank(state(0, waits_at=AT, activity=WAITING), missed)
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.RECOMPILE_LIMIT, (1,))


def test_a_collective_of_a_group_the_waiting_rank_is_not_in_does_not_hold_its_peer_for_ever() -> None:
    other = issued(1, done=False, group="7 mesh_dp")
    states = by_rank(state(0, waits_at=AT, activity=WAITING), state(1, other, groups=(GROUP, "7 mesh_dp")))
    assert stuck(states) is None


def test_other_collectives_under_one_number_are_named_with_both_lines() -> None:
    states = by_rank(
        state(0, issued(1), issued(2, done=False, at=10)),
        state(1, issued(1), issued(2, done=False, op="all_gather", at=30)),
    )
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0, 1), line(30))
    assert not found.is_rank_known


def test_other_collectives_of_a_group_across_domains_are_named_by_both_domains() -> None:
    dp = "6 mesh_dp"
    usual = state(1, issued(1, group=dp), issued(2, group=dp, done=False), groups=(GROUP, dp))
    ahead = state(3, issued(1, group=dp), issued(2, group=dp, done=False, op="all_gather", at=30), groups=(GROUP, dp))
    for here, beside in ((usual, ahead), (ahead, usual)):
        found = stuck(by_rank(here), other_domains=by_rank(beside))
        assert found is not None
        assert "all_gather" in found.observed and "all_reduce" in found.observed
    assert stuck(by_rank(usual)) is None
    assert stuck(by_rank(usual), before={}, other_domains=by_rank(ahead)) is None


@pytest.mark.parametrize(("odd", "num_steps"), [(0, 2), (1, 2), (0, 0)])
def test_of_two_ranks_in_collectives_of_two_groups_the_one_that_left_its_own_order_is_named(
    odd: int, num_steps: int
) -> None:
    """As a barrier of all ranks by one of them, in the place of the usual all-reduce of its own group."""
    tp = "7 mesh_tp"
    lines = [10, 12] * num_steps
    steps = [
        issued(seq, group=tp, at=at).model_copy(update={"age_s": 9.0 - seq}) for seq, at in enumerate([*lines, 10], 1)
    ]
    waits = issued(len(steps) + 1, group=tp, done=False, at=12).model_copy(update={"age_s": 1.0})
    usual = state(1 - odd, *steps, waits, groups=(GROUP, tp), stack=(line(10),))
    barrier = issued(1, op="barrier", at=67, done=False).model_copy(update={"age_s": 1.0})
    found = stuck(by_rank(usual, state(odd, *steps, barrier, groups=(GROUP, tp), stack=(line(67),))))
    assert found is not None
    assert found.cause == Cause.STUCK_COLLECTIVE
    assert found.ranks == ((odd,) if num_steps else (0, 1))


def test_a_rank_of_another_domain_that_waits_for_a_compile_is_no_cycle() -> None:
    dp = "6 mesh_dp"
    compiled = state(0, waits_at=AT, activity=WAITING, groups=(GROUP, dp))
    compiling = state(1, activity=COMPILING, in_dynamo=True, compile_id="0/0")
    beside = state(2, issued(1, group=dp, done=False), groups=(GROUP, dp))
    states = by_rank(compiled, compiling)
    assert stuck(states, other_domains=by_rank(beside)) is None


def test_where_the_ranks_parted_explains_a_wait_for_one_that_has_left() -> None:
    states = by_rank(
        state(0, issued(1), issued(2), issued(3), ended="finished"),
        state(1, issued(1), issued(2, at=55), issued(3), issued(4, done=False)),
        state(2, issued(1), issued(2), issued(3), ended="finished"),
    )
    found = stuck(states)
    assert found is not None
    assert (found.ranks, found.line) == ((1,), line(55))


def test_one_collective_called_from_two_lines_is_no_reason_for_an_alarm() -> None:
    states = by_rank(state(0, issued(1, at=10), issued(2, done=False)), state(1, issued(1, at=11), stack=(line(70),)))
    assert stuck(states) is None


def test_an_extra_call_from_a_line_of_its_own_is_no_compiled_twin_of_the_usual_one() -> None:
    def called(seq: int, at: int) -> Issued:
        where = {"stack": (line(10), line(at)), "call_line": line(at), "region": "f /home/me/train.py:10", "call": seq}
        return issued(seq).model_copy(update=where)

    found = parted(by_rank(state(0, called(1, 7), called(2, 7)), state(1, called(1, 7), called(2, 8))))
    assert found is not None
    assert (found.cause, found.line) == (Cause.CALL_COUNT, line(8))


@pytest.mark.parametrize(("op", "is_found"), [("all_to_all", True), ("broadcast", True), ("scatter", False)])
def test_dtypes_that_differ_are_a_mismatch_where_each_rank_passes_a_tensor(op: str, is_found: bool) -> None:
    """NCCL hangs in it. Of a scatter the root alone passes one."""
    sent = [issued(1, done=False, op=op).model_copy(update={"dtypes": dtypes}) for dtypes in ("Half", "Float")]
    found = stuck(by_rank(*(state(r, i) for r, i in enumerate(sent))), before=by_rank(state(0, sent[0])))
    assert (found is not None and found.cause is Cause.COLLECTIVE_SIZES) is is_found
    if found is not None:
        assert "half" in found.observed.lower() and "float" in found.observed.lower()


def test_sizes_that_may_differ_are_no_mismatch() -> None:
    tokens = [issued(1, done=False, op="all_to_all").model_copy(update={"sizes": size}) for size in ("3x4", "7x4")]
    states = by_rank(*(state(rank, one) for rank, one in enumerate(tokens)))
    assert stuck(states) is None
    even = [i.model_copy(update={"op": "all_reduce"}) for i in tokens]
    found = stuck(by_rank(*(state(r, i) for r, i in enumerate(even))), before=by_rank(state(0, even[0])))
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.COLLECTIVE_SIZES, (0, 1))


def test_a_collective_issued_while_compiling_waits_for_a_rank_that_waits_for_the_compile() -> None:
    compiling = state(1, issued(1, done=False, at=33), activity=COMPILING, in_dynamo=True, since_s=9.0)
    states = by_rank(state(0, waits_at=AT, activity=WAITING), compiling)
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (1,), line(33))
    older = compiling.model_copy(update={"since_s": 1.0})  # queued before the compile began: it may still end
    assert stuck({**states, 1: older}) is None


def test_a_collective_that_cannot_be_issued_yet_waits_too() -> None:
    calling = state(1, calling=GROUP, stack=(line(44),))
    states = by_rank(state(0, waits_at=AT, activity=WAITING), calling)
    found = stuck(states)
    assert found is not None
    assert (found.ranks, found.line) == ((1,), line(44))
    elsewhere = by_rank(states[0], calling.model_copy(update={"calling": "7 mesh_dp"}))
    assert stuck(elsewhere) is None
    ahead = by_rank(state(0, issued(1), waits_at=AT, activity=WAITING), calling)  # it has joined: a third one is late
    assert stuck(ahead) is None
    left = stuck(by_rank(state(0, ended=FINISHED), calling))
    assert left is not None and (left.ranks, left.line) == ((0,), line(44))
    assert stuck(by_rank(state(0), calling)) is None  # it runs the user's own code
    assert stuck(by_rank(state(0, calling=GROUP), calling)) is None  # both have arrived


def test_a_compile_that_only_one_rank_calls_is_blamed_on_that_rank() -> None:
    region = Position(region="block train.py:1", call=3, index=0)
    waiting = state(1, waits_at=Position(region="stats stats.py:9", call=1, index=0), activity=WAITING)
    states = by_rank(state(0, issued(1, done=False), position=region), waiting)
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.EXTRA_COMPILE, (1,), line(21))


def test_a_send_that_no_rank_receives_is_blamed_on_the_receiver() -> None:
    send = PointToPoint(op="send", peer=1, line=line(77))
    states = by_rank(state(0, p2p=send), state(1, issued(3, done=False)))
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (1,), line(77))
    assert stuck(by_rank(states[0], state(1)), before=states) is None  # it may still come


def test_collectives_of_two_groups_in_opposite_order_on_the_gpu() -> None:
    def both(first: str, second: str) -> tuple[Issued, Issued]:
        older = issued(1, done=False, group=first, at=10 if first == GROUP else 11).model_copy(update={"age_s": 5.0})
        return older, issued(1, done=False, group=second, at=11 if first == GROUP else 10)

    groups = (GROUP, "7 mesh_dp")
    states = by_rank(state(0, *both(*groups), groups=groups), state(1, *both(*groups[::-1]), groups=groups))
    found = stuck(states)
    assert found is not None
    assert found.ranks == (0, 1) and "opposite order" in found.observed
    alike = by_rank(states[0], state(1, *both(*groups), groups=groups))
    assert stuck(alike) is None
    slow = states | by_rank(state(2, groups=groups))  # a third rank has joined neither
    assert stuck(slow) is None


def test_a_rank_that_moves_is_not_stuck_in_what_it_has_queued() -> None:
    send = state(0, p2p=PointToPoint(op="send", peer=1, line=line(77)))
    busy = state(1, issued(3, done=False), stack=(line(90),))
    assert stuck(by_rank(send, busy), before=by_rank(send, state(1, issued(3, done=False)))) is None


def test_mismatches_of_the_past_are_not_reported_while_all_ranks_progress() -> None:
    states = by_rank(state(0, issued(1, at=10), issued(2, at=10)), state(1, issued(1, at=10), issued(2, at=30)))
    assert stuck(states) is None


def test_ranks_at_two_frames_of_one_call_are_left_to_the_comparison() -> None:
    ahead = state(0, waits_at=AT.model_copy(update={"index": 2}), activity=WAITING)
    behind = state(1, waits_at=AT, activity=WAITING)
    assert stuck(by_rank(ahead, behind)) is None


def test_ranks_that_compiled_in_opposite_order_wait_for_each_other() -> None:
    other = Position(region="g", call=1, index=0)
    states = by_rank(state(0, waits_at=AT, activity=WAITING), state(1, waits_at=other, activity=WAITING))
    found = stuck(states, before={})
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.ORDER_FORWARD, (0, 1))


MODEL, LAYER = "Model.forward train.py:40", "Layer.forward train.py:20"


def whole_and_part(rank: int, at: int) -> RankState:
    """A rank that compiled the model, or a layer from a line inside of it."""
    region = MODEL if at == 90 else LAYER
    stack = [line(90).model_copy(update={"function": "main"})]
    if region == LAYER:
        stack.append(line(at).model_copy(update={"function": "forward"}))
    here = Position(region=region, call=1, index=0)
    return state(rank, waits_at=here, position=here, activity=WAITING, stack=tuple(stack), calls={region: 1})


@pytest.mark.parametrize(
    ("lines", "cause", "ranks"),
    [
        ((90, 45), Cause.REGIONAL_COMPILE, (0, 1)),
        ((90, 90, 45), Cause.REGIONAL_COMPILE, (2,)),
        ((90, 25), Cause.ORDER_FORWARD, (0, 1)),
    ],
    ids=["two ranks", "the odd one of three", "a layer that is called elsewhere"],
)
def test_a_rank_that_compiles_a_part_of_what_others_compile_whole_is_not_a_different_order(
    lines: tuple[int, ...], cause: Cause, ranks: tuple[int, ...]
) -> None:
    states = by_rank(*(whole_and_part(rank, at) for rank, at in enumerate(lines)))
    found = stuck(states, before={})
    assert found is not None
    assert (found.cause, found.ranks) == (cause, ranks)


def test_whole_and_part_stand_at_the_line_of_the_program_not_in_a_package() -> None:
    package = UserLine(file="/venv/lib/python3.11/site-packages/transformers/modeling.py", line=7, function="loss")
    whole, part = whole_and_part(0, 90), whole_and_part(1, 45)
    inside = whole.model_copy(update={"stack": (*whole.stack, package)})
    found = stuck(by_rank(inside, part), before={})
    assert found is not None and found.line is not None and found.line.line == 90


def test_a_rank_that_broke_its_graph_and_went_on_is_left_to_the_comparison() -> None:
    whole, part = whole_and_part(0, 90), whole_and_part(2, 45)
    broke = part.model_copy(update={"calls": {MODEL: 1, LAYER: 1}})
    late = state(1, activity=COMPILING, in_dynamo=True, compile_id="0/0")
    assert stuck(by_rank(whole, late, broke), before={}) is None
    assert stuck(by_rank(whole, late, part), before={}) is not None


@pytest.mark.parametrize(("function", "at"), [("forward", 60), ("helper", 12)])
def test_a_rank_that_does_not_compile_is_named_where_it_calls_the_function(function: str, at: int) -> None:
    inside = line(45).model_copy(update={"function": function})
    inner = issued(1, done=False, at=12).model_copy(update={"stack": (line(12), inside, line(60))})
    waits = Position(region=MODEL, call=1, index=0)
    states = by_rank(state(0, waits_at=waits, activity=WAITING), state(1, inner, stack=(line(60), inside, line(12))))
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.line and found.line.line) == (Cause.COMPILE_DISABLED, at)


def test_waiting_for_a_rank_that_has_left_is_named() -> None:
    states = by_rank(state(0, issued(3), issued(4, done=False)), state(1, issued(3), ended="finished"))
    found = stuck(states)
    assert found is not None
    assert (found.ranks, found.line) == ((1,), line(10))
    assert "has left: finished" in found.observed


def test_a_rank_that_left_early_left_out_a_call_also_where_calls_are_not_known() -> None:
    in_a_call = issued(4, done=False).model_copy(update={"call_line": line(7), "stack": (line(10), line(7))})
    states = by_rank(state(0, issued(3), in_a_call), state(1, issued(3), ended="finished"))
    found = stuck(states)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.CALL_COUNT, (1,), line(7))
    raised = by_rank(states[0], state(1, issued(3), ended="ValueError: no"))
    other = stuck(raised)
    assert other is not None and other.cause == Cause.STUCK_COLLECTIVE


def test_every_state_is_described_in_one_line() -> None:
    compiling = state(3, activity=COMPILING, compile_id="0/1", reason="L['x'].stride()[0] == 16", stack=(line(7),))
    says = describe(compiling)
    assert "rank 3 has been compiling 0/1 for 4.0 s because L['x'].stride()[0] == 16" in says and "train.py:7" in says
    assert "all_reduce #17" in describe(state(0, issued(17, done=False), blocked=True))


def test_a_rank_in_dynamo_whose_compile_has_not_begun_is_described_without_its_id() -> None:
    at_its_start = state(3, in_dynamo=True, position=AT)
    assert describe(at_its_start) == f"rank 3 is compiling a frame of f at {line(23)}"
    begun = at_its_start.model_copy(update={"activity": COMPILING, "compile_id": "0/1"})
    assert re.fullmatch(rf"rank 3 .*compiling 0/1 of f .*4\.0 s at {line(23)}", describe(begun))


def test_a_rank_that_waits_at_a_phase_of_the_gate_is_described_by_it() -> None:
    assert re.fullmatch("rank 1 .*finished .*target/first", describe(state(1, ended="finished", phase="target/first")))
    assert describe(state(1, ended="finished")) == "rank 1 has left: finished"


def test_communication_that_failed_because_a_rank_left_names_it() -> None:
    here = state(0, issued(4, done=False, at=10))
    found = lost_to_exited(by_rank(state(1, ended="finished")), here)
    assert found is not None
    assert (found.ranks, found.line) == ((1,), line(10))
    assert lost_to_exited({}, here) is None


def _broadcasts(*seq: int, cpu_s: float, age_s: float) -> dict[int, RankState]:
    """Each rank waits in a broadcast of that number, and has used that CPU time."""
    own = [
        [issued(number, op="broadcast") for number in range(1, last)] + [issued(last, done=False, op="broadcast")]
        for last in seq
    ]
    aged = [[one.model_copy(update={"age_s": age_s}) for one in each] for each in own]
    members = {GROUP: tuple(range(len(seq)))}
    fields = {"cpu_s": cpu_s, "members": members, "blocked": True}
    return by_rank(*(state(rank, *each, **fields) for rank, each in enumerate(aged)))


def test_ranks_that_all_wait_idle_in_what_all_have_issued_stand_still() -> None:
    now = _broadcasts(5, 5, 5, 3, cpu_s=1.1, age_s=9.0)
    before = _broadcasts(5, 5, 5, 3, cpu_s=1.0, age_s=4.0)
    found = stuck(now, before=before)
    assert found is not None
    assert (found.cause, found.ranks, found.is_rank_known) == (Cause.STUCK_COLLECTIVE, (3,), True)
    together = stuck(_broadcasts(4, 4, cpu_s=1.1, age_s=9.0), before=_broadcasts(4, 4, cpu_s=1.0, age_s=4.0))
    assert together is not None
    assert (together.ranks, together.is_rank_known) == ((0, 1), False)


@pytest.mark.parametrize(("cpu_s", "why"), [(4.0, "data is on its way"), (6.0, "a GPU may compute: time passes")])
def test_a_rank_that_uses_cpu_time_may_get_on(cpu_s: float, why: str) -> None:
    before = _broadcasts(4, 4, cpu_s=1.0, age_s=4.0)
    assert stuck(_broadcasts(4, 4, cpu_s=cpu_s, age_s=9.0), before=before) is None, why


@pytest.mark.parametrize(
    "differs",
    [{"members": {GROUP: (0, 1, 2)}}, {"blocked": False}],
    ids=["a rank of a different domain is in the group, and may be late", "its main thread does something else"],
)
def test_ranks_that_wait_idle_for_what_may_come_do_not_stand_still(differs: dict[str, Any]) -> None:
    now, before = _broadcasts(4, 4, cpu_s=1.1, age_s=9.0), _broadcasts(4, 4, cpu_s=1.0, age_s=4.0)
    now = {rank: one.model_copy(update=differs) for rank, one in now.items()}
    before = {rank: one.model_copy(update=differs) for rank, one in before.items()}
    assert stuck(now, before=before) is None


def test_a_rank_outside_of_communication_may_get_the_others_on() -> None:
    before = _broadcasts(4, 4, cpu_s=1.0, age_s=4.0)
    now = _broadcasts(4, 4, cpu_s=1.1, age_s=9.0)
    then, later = (state(1, cpu_s=cpu_s, members={GROUP: (0, 1)}) for cpu_s in (1.0, 1.1))
    assert stuck({**now, 1: later}, before={**before, 1: then}) is None


@pytest.mark.parametrize("num_sent", [2, 3])
def test_a_message_of_which_both_ends_are_posted_holds_nobody(num_sent: int) -> None:
    """Rank 0 waits for rank 2, and never for its sends to rank 1, which look open for ever."""
    received = [Message(op="recv", peer=0, number=number) for number in range(1, num_sent + 1)]
    first = state(0, p2p=PointToPoint(op="send", peer=1, number=3), blocked=True)
    second = state(1, p2p=PointToPoint(op="recv", peer=0, number=num_sent + 1), messages=received, blocked=True)
    found = stuck(by_rank(first, second, state(2)))
    assert (found is None) == (num_sent == 3)


@pytest.mark.parametrize(("tag", "is_found"), [(1, True), (2, False)])
def test_a_message_with_another_tag_ends_no_wait(tag: int, is_found: bool) -> None:
    """Rank 1 waits for a header, with tag 1, of which rank 0 has sent one; it sends data, of which it sent many."""
    headers = [Message(op="send", peer=1, number=1, tag=1, number_of_tag=1)]
    data = [Message(op="send", peer=1, number=number, tag=2, number_of_tag=number - 1) for number in range(2, 6)]
    sends = PointToPoint(op="send", peer=1, number=5, tag=2, number_of_tag=4)
    receives = PointToPoint(op="recv", peer=0, number=5, tag=tag, number_of_tag=2 if tag == 1 else 4)
    received = [Message(op="recv", peer=0, number=number, tag=2, number_of_tag=number - 1) for number in range(2, 5)]
    ends = [Message(op="recv", peer=0, number=5, tag=tag, number_of_tag=receives.number_of_tag)]
    first = state(0, p2p=sends, messages=(*headers, *data), blocked=True)
    second = state(1, p2p=receives, messages=(*received, *ends), blocked=True)
    found = stuck(by_rank(first, second))
    assert (found is not None) == is_found
    assert found is None or ("with tag 1" in found.observed and "with tag 2" in found.observed)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_message_that_is_queued_on_a_gpu_behind_one_in_flight_ends_no_wait(is_queued: bool) -> None:
    """Both ranks receive first; rank 1 has queued its send behind that."""
    sent = [Message(op="send", peer=0, number=3, is_queued=is_queued)]
    first = state(0, p2p=PointToPoint(op="recv", peer=1, number=3), blocked=True)
    second = state(1, p2p=PointToPoint(op="recv", peer=0, number=3), messages=sent, blocked=True)
    assert (stuck(by_rank(first, second)) is not None) == is_queued
