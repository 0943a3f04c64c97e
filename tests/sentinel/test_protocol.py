"""Histories of N protocols: no deadlock, no false alarm, the right rank, whatever the order of events."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from tests.sentinel.simulated import Call, Die, Eager, Job, Op, Pause
from tpcompile.sentinel import protocol
from tpcompile.sentinel.events import Compared, PeerPassed

NUM_HISTORIES = int(os.environ.get("NUM_HISTORIES", 2_000))
Programs = list[list[Op]]


def common_program(draw: random.Random) -> list[Op]:
    """Steps that all ranks run: calls of two regions, with variants, and eager collectives."""
    steps: list[Op] = []
    for _ in range(draw.randint(3, 6)):
        steps.append(Call("block", draw.choice("ab"), line=10))
        if draw.random() < 0.3:
            steps.append(Call("head", "a", num_collectives=0, line=12))
        if draw.random() < 0.4:
            steps.append(Eager(14))
    return [*steps, Call("block", "a", line=10), Eager(16)]


def healthy(draw: random.Random) -> Programs:
    """The same on all ranks but for what may differ: pauses, slow compiles, and functions of one rank's own."""
    program = common_program(draw)
    ranks = [list(program) for _ in range(draw.choice((2, 2, 3)))]
    for steps in ranks:
        if draw.random() < 0.3:
            steps.insert(draw.randrange(len(steps)), Pause(draw.choice((0.2, 3.0))))
        if draw.random() < 0.2:
            own = Call("metric", draw.choice("xy"), num_collectives=0, line=30)
            steps.insert(draw.randrange(len(steps)), own)
    if draw.random() < 0.2:
        first, second = Call("f", num_collectives=0, line=40), Call("g", num_collectives=0, line=41)
        for rank, steps in enumerate(ranks):
            steps[:0] = [first, second] if rank == 0 else [second, first]
    return ranks


def calls_of(steps: list[Op]) -> list[int]:
    return [place for place, op in enumerate(steps) if isinstance(op, Call) and op.region == "block"]


def one_rank_recompiles(steps: list[Op], draw: random.Random) -> None:
    steps[draw.choice(calls_of(steps)[1:])] = Call("block", "odd", content="odd", line=10)


def content_differs(steps: list[Op], draw: random.Random) -> None:
    variant = next(op.variant for op in steps if isinstance(op, Call) and op.region == "block")
    for place in calls_of(steps):
        op = steps[place]
        assert isinstance(op, Call)
        if op.variant == variant:
            steps[place] = Call("block", variant, content="odd", line=10)


def extra_eager(steps: list[Op], draw: random.Random) -> None:
    steps.insert(draw.randrange(len(steps)), Eager(99))


def extra_call(steps: list[Op], draw: random.Random) -> None:
    """Where the others compile at that call, this rank would be the one that went past: not here."""
    places = calls_of(steps)
    variants = [steps[place].variant for place in places]  # type: ignore[union-attr]
    place = draw.choice([p for n, p in enumerate(places) if set(variants[n + 1 :]) <= set(variants[: n + 1])])
    op = steps[place]
    assert isinstance(op, Call)
    steps.insert(place + 1, Call("block", op.variant, line=98))


def leaves(steps: list[Op], draw: random.Random) -> None:
    del steps[draw.choice(calls_of(steps)) :]


def dies(steps: list[Op], draw: random.Random) -> None:
    steps.insert(draw.randrange(len(steps)), Die())


FAULTS = [one_rank_recompiles, content_differs, extra_eager, extra_call, leaves, dies]


def faulty(draw: random.Random, plant: Callable[[list[Op], random.Random], None]) -> tuple[Programs, int]:
    """Three ranks, one of which does something else: of two, neither is known to be wrong."""
    program = common_program(draw)
    ranks = [list(program) for _ in range(3)]
    odd = draw.randrange(3)
    plant(ranks[odd], draw)
    return ranks, odd


def long_loop(draw: random.Random, *, ranks: int) -> Programs:
    """Iterations that take a while: micro-batches, an optimizer, now and then a metric; all ranks alike."""
    communicates, micro_batches = draw.randint(0, 1), draw.choice((1, 1, 2, 3))
    is_summed = draw.random() < 0.5 or not communicates
    program: list[Op] = []
    for step in range(draw.randint(30, 40)):
        program.append(Pause(draw.choice((0.1, 0.3))))
        program += [Call("block", num_collectives=communicates, step=step, line=10)] * micro_batches
        if is_summed:
            program.append(Eager(14))
        program.append(Call("optimizer", num_collectives=0, step=step, line=12))
    return [list(program) for _ in range(ranks)]


def evaluates_alone(steps: list[Op], draw: random.Random) -> None:
    """A rank calls what does not communicate more often than the others, once or now and then."""
    for place in sorted(draw.sample(range(len(steps)), draw.randint(1, 3)), reverse=True):
        step = next(op.step for op in reversed(steps[: place + 1]) if isinstance(op, Call)) if place > 1 else 0
        steps[place:place] = [Call("optimizer", num_collectives=0, step=step, line=12)] * draw.randint(1, 5)


def skips_a_batch(steps: list[Op], draw: random.Random) -> None:
    """All of an iteration but the collectives that the others wait in."""
    odd = draw.randint(12, 18)
    steps[:] = [op for op in steps if not (isinstance(op, Call) and op.step == odd)]


def skips_the_optimizer(steps: list[Op], draw: random.Random) -> None:
    odd = draw.randint(12, 18)
    steps[:] = [op for op in steps if not (isinstance(op, Call) and (op.region, op.step) == ("optimizer", odd))]


SKIPS = [skips_a_batch, skips_the_optimizer]


def test_long_loops_of_ranks_that_run_the_same_end_in_peace() -> None:
    for seed in range(NUM_HISTORIES // 40):
        draw = random.Random(seed)
        programs = long_loop(draw, ranks=draw.choice((2, 3)))
        if seed % 2:
            evaluates_alone(programs[0], draw)
        assert (found := Job(programs, seed).run()) is None, f"seed {seed}: {found}"


@pytest.mark.parametrize("plant", SKIPS)
def test_a_call_left_out_in_a_long_loop_names_the_rank_while_the_loop_runs(
    plant: Callable[[list[Op], random.Random], None],
) -> None:
    for seed in range(NUM_HISTORIES // 40):
        draw = random.Random(seed)
        programs = long_loop(draw, ranks=2)
        odd = draw.randrange(2)
        plant(programs[odd], draw)
        job = Job(programs, seed)
        verdict = job.run()
        assert verdict is not None, f"seed {seed}: no verdict"
        assert verdict.ranks == (odd,), f"seed {seed}: {verdict}, and rank {odd} is at fault"
        assert not any(rank.has_left for rank in job.ranks), f"seed {seed}: {verdict}, at the end only"


def test_a_protocol_without_the_counts_would_not_see_a_skipped_call(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = long_loop(random.Random(1), ranks=2)
    skips_the_optimizer(programs[1], random.Random(1))
    on = protocol.Protocol.on
    monkeypatch.setattr(
        protocol.Protocol, "on", lambda self, event: [] if isinstance(event, Compared) else on(self, event)
    )
    assert Job(programs, 1).run() is None
    monkeypatch.undo()
    found = Job(programs, 1).run()
    assert found is not None and found.ranks == (1,)


@pytest.mark.slow
def test_healthy_ranks_end_in_peace_in_every_order_of_events() -> None:
    for seed in range(NUM_HISTORIES // 2):
        job = Job(healthy(random.Random(seed)), seed)
        assert job.run() is None, f"seed {seed}: {job.verdict}"


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS)
def test_a_faulty_rank_is_named_in_every_order_of_events(plant: Callable[[list[Op], random.Random], None]) -> None:
    for seed in range(NUM_HISTORIES // 2 // len(FAULTS)):
        programs, odd = faulty(random.Random(seed), plant)
        verdict = Job(programs, seed).run()
        assert verdict is not None, f"seed {seed}: no verdict"
        assert verdict.ranks == (odd,), f"seed {seed}: {verdict}, and rank {odd} is at fault"


def test_a_job_that_is_started_again_after_a_death_is_left_alone() -> None:
    for seed in range(80):
        programs, _ = faulty(random.Random(seed), dies)
        assert Job(programs, seed).run() is not None
        again = [[op for op in steps if not isinstance(op, Die)] for steps in programs]
        assert Job(again, seed).run() is None


def test_a_protocol_without_passed_positions_would_not_see_a_one_rank_recompile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = protocol.Protocol.on
    monkeypatch.setattr(
        protocol.Protocol, "on", lambda self, event: [] if isinstance(event, PeerPassed) else on(self, event)
    )
    programs: Programs = [
        [Call("f", v, num_collectives=0) for v in "aa"],
        [Call("f", v, num_collectives=0) for v in "ab"],
    ]
    assert Job(programs, 1).run() is None
    monkeypatch.undo()
    found = Job(programs, 1).run()
    assert found is not None and found.ranks == (1,)
