"""What the logs say was scheduled and what ran -> divergences: evidence beside the graphs.

Inductor may reorder and bucket collectives on each rank for itself, and a program may call its graphs in another
order; the graphs of all ranks are equal then, and the job hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import group_by
from tpcompile.evidence.logs.domains import Domain
from tpcompile.evidence.logs.jobdigest import Frame, Job
from tpcompile.evidence.logs.ranklog import LoggedCompile, RankLog
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, RankGroup, UserLine, value_item
from tpcompile.evidence.text.ranks import ranks_text

_OP = "torch.ops._c10d_functional."
_WAIT = "wait_tensor"
_SCHEDULED = (
    "The graphs are the same; Inductor reordered, bucketed or dropped collectives on some ranks only. Compare "
    "torch._inductor.config (reorder_for_compute_comm_overlap, bucketing) and its environment on these ranks."
)
_EXECUTED = "Every rank has the same graphs and calls them in another order. Look at what decides which one is called."


@dataclass(frozen=True)
class _Step:
    """The compiles of one frame that ranks made at the same turn."""

    frame: Frame
    compiles: Mapping[int, LoggedCompile]
    """By rank."""

    @property
    def lines(self) -> dict[int, UserLine | None]:
        return {rank: compile_.line for rank, compile_ in self.compiles.items()}


def scheduled(job: Job, domain: Domain) -> Iterator[Divergence]:
    """Compiles for which Inductor scheduled other collectives, or the same in another order, on some ranks."""
    for step in _in_step(job, domain):
        known = {rank: compile_.schedules for rank, compile_ in step.compiles.items() if compile_.schedules}
        common = min(map(len, known.values()), default=0)
        orders = {rank: _flat(schedules[:common]) for rank, schedules in known.items()}
        if len(set(orders.values())) < 2:
            continue
        is_moved = len({tuple(sorted(order)) for order in orders.values()}) == 1
        place = _first_difference(list(orders.values()))
        yield _divergence(
            domain,
            f"compile {step.compiles[min(known)].compile_id} of {_text(step.frame)}",
            f"Inductor scheduled other collectives, first at number {place}",
            {rank: _at(order, place) for rank, order in orders.items()},
            Cause.ORDER_FORWARD if is_moved else Cause.EXTRA_COLLECTIVE,
            _SCHEDULED,
            lines=step.lines,
        )


def executed(job: Job, domain: Domain) -> Iterator[Divergence]:
    """Compiled graphs with collectives that ranks ran in another order, or not equally often."""
    runs = {log.rank: _run(job, log) for log in job.logs_of(domain) if log.executions}
    if len(set(runs.values())) < 2:
        return
    place = _first_difference(list(runs.values()))
    title = f"compiled graphs with collectives ran in another order, first as number {place}"
    said = {rank: _at(run, place) for rank, run in runs.items()}
    yield _divergence(domain, "", title, said, Cause.ORDER_FORWARD, _EXECUTED)


def lonely_groups(job: Job, domain: Domain) -> Iterator[Divergence]:
    """A process group that one rank alone issues a collective in, where its peers use a group of another name.

    Groups with equal members are two groups all the same: on NCCL each has a communicator of its own.
    """
    logs = job.logs_of(domain)
    if len(logs) < len(domain.ranks) or job.incomplete & set(domain.ranks):
        return  # a peer may have been in the group
    users = Counter(name for log in logs for name in log.coupling)
    lonely = {name for name, number in users.items() if number == 1}
    for step in _in_step(job, domain):
        place = _first_lonely(step, lonely)
        if place is None:
            continue
        at = {rank: compile_.issued[place] for rank, compile_ in step.compiles.items()}
        yield _divergence(
            domain,
            f"compile of {_text(step.frame)}",
            f"collective number {place} is issued in groups of other names",
            {rank: f"{op} in group {group!r}" for rank, (op, group) in at.items()},
            Cause.GROUP,
            Cause.GROUP.advice,
            lines=step.lines,
        )
        return


def _first_lonely(step: _Step, lonely: set[str]) -> int | None:
    """The first collective that all ranks issue in groups of different names, one of them used by one rank alone."""
    issued = [compile_.issued for compile_ in step.compiles.values()]
    for place, column in enumerate(zip(*issued, strict=False)):
        ops, groups = map(set, zip(*column, strict=True))
        if len(ops) == 1 and len(groups) > 1 and groups & lonely:
            return place
    return None


def _in_step(job: Job, domain: Domain) -> Iterator[_Step]:
    """Compiles of the same frame and turn; those that one rank alone made are left to the comparison."""
    by_frame: dict[Frame, dict[int, list[LoggedCompile]]] = {}
    for log in job.logs_of(domain):
        for compile_ in log.compiles:
            by_frame.setdefault(compile_.frame, {}).setdefault(log.rank, []).append(compile_)
    for frame, by_rank in by_frame.items():
        if len(by_rank) > 1:
            for turn in zip(*by_rank.values(), strict=False):
                yield _Step(frame, dict(zip(by_rank, turn, strict=True)))


def _flat(schedules: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Collectives as scheduled, without the waits: where a rank waits is its own affair."""
    names = [name.removeprefix(_OP) for schedule in schedules for name in schedule]
    return tuple(name for name in names if not name.startswith(_WAIT))


def _run(job: Job, log: RankLog) -> tuple[str, ...]:
    """The graphs with collectives that a rank ran, named by what they are and not by their compile id."""
    by_id = {compile_.compile_id: compile_ for compile_ in log.compiles}
    programs = {name: _program(job, log.rank, compile_) for name, compile_ in by_id.items() if compile_.issued}
    ran = [name for order in log.executions for name in order]
    return tuple(programs[name] for name in ran if name in programs)


def _program(job: Job, rank: int, compile_: LoggedCompile) -> str:
    issued = [f"{op} in {job.role(rank, group)}" for op, group in compile_.issued]
    return f"{_text(compile_.frame)} with {', '.join(issued)}"


def _first_difference(rows: Sequence[Sequence[str]]) -> int:
    """The first place at which sequences differ; one may end there."""
    for place, column in enumerate(zip(*rows, strict=False)):
        if len(set(column)) > 1:
            return place
    return min(map(len, rows))


def _at(row: Sequence[str], place: int) -> str:
    return row[place] if place < len(row) else f"nothing, {len(row)} in all"


def _text(frame: Frame) -> str:
    function, file, line = frame
    return f"{function} {file}:{line}" if file else function or "?"


def _divergence(
    domain: Domain,
    where: str,
    title: str,
    said: Mapping[int, str],
    cause: Cause,
    advice: str,
    *,
    lines: Mapping[int, UserLine | None] = MappingProxyType({}),
) -> Divergence:
    """A finding from what each rank has, and its line."""
    sides = [(ranks, said[ranks[0]], lines.get(ranks[0])) for ranks in group_by(said)]
    groups = [RankGroup(ranks=ranks, item=value_item(title, text), frame_line=line) for ranks, text, line in sides]
    differing = " against ".join(f"{text} on rank {ranks_text(ranks)}" for ranks, text, _ in sides)
    return Divergence(
        layer=Layer.COLLECTIVES,
        cls=DivergenceClass.COLLECTIVES,
        domain=domain.name,
        where=where,
        groups=tuple(groups),
        title=f"{title}: {differing}",
        cause=cause,
        advice=advice,
    )
