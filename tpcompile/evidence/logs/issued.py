"""What the logs say was scheduled and what ran -> divergences: evidence beside the graphs.

Inductor may reorder and bucket collectives on each rank for itself, and a program may call its graphs in another
order; the graphs of all ranks are equal then, and the job hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.logs.domains import Domain
from tpcompile.evidence.logs.jobdigest import Frame, Job
from tpcompile.evidence.logs.ranklog import LoggedCompile, RankLog, numbers_by_frame
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, RankGroup, UserLine, value_item
from tpcompile.evidence.text.ranks import ranks_text

_OP = "torch.ops._c10d_functional."
Side = tuple[list[int], str, UserLine | None]
"""Ranks that agree, what they have, and where."""


def scheduled(job: Job, domain: Domain) -> Iterator[Divergence]:
    """Compiles for which Inductor scheduled other collectives, or the same in another order, on some ranks."""
    for frame, compiles in _in_step(job, domain):
        known = {rank: compile_ for rank, compile_ in compiles.items() if compile_.schedules}
        common = min((len(compile_.schedules) for compile_ in known.values()), default=0)
        orders = {rank: _flat(compile_.schedules[:common]) for rank, compile_ in known.items()}
        if len(set(orders.values())) < 2:
            continue
        is_moved = len({frozenset(Counter(order).items()) for order in orders.values()}) == 1
        place = _first_difference(list(orders.values()))
        texts = {rank: _at(order, place) for rank, order in orders.items()}
        yield _divergence(
            domain,
            f"compile {next(iter(known.values())).compile_id} of {_text(frame)}",
            f"Inductor scheduled other collectives, first at number {place}",
            [(ranks, text, compiles[ranks[0]].line) for ranks, text in _grouped(texts)],
            Cause.ORDER_FORWARD if is_moved else Cause.EXTRA_COLLECTIVE,
            "The graphs are the same; Inductor reordered, bucketed or dropped collectives on some ranks only. Compare "
            "torch._inductor.config (reorder_for_compute_comm_overlap, bucketing) and its environment on these ranks.",
        )


def executed(job: Job, domain: Domain) -> Iterator[Divergence]:
    """Compiled graphs with collectives that ranks ran in another order, or not equally often."""
    logs = [log for log in job.logs_of(domain) if log.executions]
    runs = {log.rank: _run(job, log) for log in logs}
    if len(set(runs.values())) < 2:
        return
    place = _first_difference(list(runs.values()))
    texts = {rank: _at(run, place) for rank, run in runs.items()}
    yield _divergence(
        domain,
        "",
        f"compiled graphs with collectives ran in another order, first as number {place}",
        [(ranks, text, None) for ranks, text in _grouped(texts)],
        Cause.ORDER_FORWARD,
        "Every rank has the same graphs and calls them in another order. Look at what decides which one is called.",
    )


def lonely_groups(job: Job, domain: Domain) -> Iterator[Divergence]:
    """A process group that one rank alone issues a collective in, where its peers use a group of another name.

    Groups with equal members are two groups all the same: on NCCL each has a communicator of its own.
    """
    logs = job.logs_of(domain)
    if len(logs) < len(domain.ranks) or job.incomplete & set(domain.ranks):
        return  # a peer may have been in the group
    users = Counter(name for log in logs for name in log.groups)
    for frame, compiles in _in_step(job, domain):
        columns = [_issued(compile_) for compile_ in compiles.values()]
        for place, column in enumerate(zip(*columns, strict=False)):
            ops, groups = {op for op, _ in column}, [group for _, group in column]
            if len(ops) > 1 or len(set(groups)) < 2 or not any(users[group] == 1 for group in groups):
                continue
            texts = {rank: f"{ops.copy().pop()} in group {g!r}" for rank, g in zip(compiles, groups, strict=True)}
            yield _divergence(
                domain,
                f"compile of {_text(frame)}",
                f"collective number {place} is issued in groups of other names",
                [(ranks, text, compiles[ranks[0]].line) for ranks, text in _grouped(texts)],
                Cause.GROUP,
                Cause.GROUP.advice,
            )
            return


def _in_step(job: Job, domain: Domain) -> Iterator[tuple[Frame, dict[int, LoggedCompile]]]:
    """Compiles of the same frame and number, by rank; those that one rank alone made are left to the comparison."""
    logs = job.logs_of(domain)
    numbers = {log.rank: numbers_by_frame(log.compiles) for log in logs}
    for frame in dict.fromkeys(frame for by_frame in numbers.values() for frame in by_frame):
        have = [log for log in logs if frame in numbers[log.rank]]
        for step in zip(*(numbers[log.rank][frame] for log in have), strict=False):
            if len(have) > 1:
                yield frame, {log.rank: log.compiles[number] for log, number in zip(have, step, strict=True)}


def _flat(schedules: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Collectives as scheduled, without the waits: where a rank waits is its own affair."""
    names = [name.removeprefix(_OP) for schedule in schedules for name in schedule]
    return tuple(name for name in names if not name.startswith("wait_tensor"))


def _issued(compile_: LoggedCompile) -> list[tuple[str, str]]:
    return [(op, group) for op, group in compile_.issued if not op.startswith("wait_tensor")]


def _run(job: Job, log: RankLog) -> tuple[str, ...]:
    """The graphs with collectives that a rank ran, named by what they are and not by their compile id."""
    by_id = {compile_.compile_id: compile_ for compile_ in log.compiles}
    ran = [by_id[name] for order in log.executions for name in order if name in by_id]
    return tuple(_program(job, log.rank, compile_) for compile_ in ran if _issued(compile_))


def _program(job: Job, rank: int, compile_: LoggedCompile) -> str:
    issued = [f"{op} in {job.role(rank, group)}" for op, group in _issued(compile_)]
    return f"{_text(compile_.frame)} with {', '.join(issued)}"


def _first_difference(rows: Sequence[Sequence[str]]) -> int:
    """The first place at which sequences differ; one may end there."""
    columns = zip(*rows, strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, rows)))


def _at(row: Sequence[str], place: int) -> str:
    return row[place] if place < len(row) else f"nothing, {len(row)} in all"


def _grouped(texts: dict[int, str]) -> list[tuple[list[int], str]]:
    """Ranks with equal text, the largest group first."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return sorted(((ranks, text) for text, ranks in groups.items()), key=lambda pair: (-len(pair[0]), pair[0]))


def _text(frame: Frame) -> str:
    function, file, line = frame
    return f"{function} {file}:{line}" if file else function or "?"


def _divergence(domain: Domain, where: str, title: str, sides: Sequence[Side], cause: Cause, advice: str) -> Divergence:
    groups = [
        RankGroup(ranks=tuple(ranks), item=value_item(title, text), frame_line=line) for ranks, text, line in sides
    ]
    said = " against ".join(f"{text} on rank {ranks_text(ranks)}" for ranks, text, _ in sides)
    return Divergence(
        layer=Layer.COLLECTIVES,
        cls=DivergenceClass.COLLECTIVES,
        domain=domain.name,
        where=where,
        groups=tuple(groups),
        title=f"{title}: {said}",
        cause=cause,
        advice=advice,
    )
