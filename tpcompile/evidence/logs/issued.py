"""What was scheduled and what ran, by the logs -> divergences: evidence besides the graphs.

Inductor may reorder and bucket collectives on each rank alone, and a program may call its graphs in a different
order; the graphs of all ranks are equal then, and the job hangs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.logs.job import DomainLogs, Member, Step
from tpcompile.evidence.logs.ranklog import LoggedCompile
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, RankGroup, UserLine, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks

_OP = "torch.ops._c10d_functional."
_WAIT = "wait_tensor"

Orders = ByRank[tuple[str, ...]]


def beside_the_graphs(logs: DomainLogs) -> list[Divergence]:
    """All divergences in these logs besides those of the graphs."""
    return [*lonely_groups(logs), *scheduled(logs), *executed(logs)]


def scheduled(logs: DomainLogs) -> Iterator[Divergence]:
    """Compiles for which Inductor scheduled different collectives, or a different order of them, on some ranks."""
    for step in logs.steps():
        orders = _orders(step.compiles.where(lambda compile_: compile_.schedules))
        if orders.differ(tuple):
            yield _rescheduled(logs, step, orders)


def _orders(compiles: ByRank[LoggedCompile]) -> Orders:
    """What Inductor scheduled, on ranks that logged equally many schedules: a part that was loaded from a cache has
    none, so that of two lists of different length it is not known which ones correspond."""
    if compiles.differ(lambda compile_: len(compile_.schedules)):
        return ByRank({})
    return compiles.map(lambda compile_: _flat(compile_.schedules))


def _rescheduled(logs: DomainLogs, step: Step, orders: Orders) -> Divergence:
    place = _first_difference(orders)
    has_others = orders.differ(lambda order: tuple(sorted(order)))
    return _divergence(
        logs,
        f"compile {step.compiles[orders.ranks[0]].compile_id} of {step.frame}",
        f"Inductor scheduled different collectives, first at number {place}",
        orders.map(lambda order: _at(order, place)),
        Cause.EXTRA_COLLECTIVE if has_others else Cause.ORDER_FORWARD,
        "",
        lines=_lines(step),
    )


def executed(logs: DomainLogs) -> Iterator[Divergence]:
    """Compiled graphs with collectives that ranks ran in different orders, or not equally often."""
    if not logs.is_whole:
        return  # a run of a graph whose compile is damaged has no name
    runs = logs.members.where(lambda member: member.log.executions).map(_run)
    if not runs.differ(tuple):
        return
    place = _first_difference(runs)
    title = f"compiled graphs with collectives ran in a different order, first at number {place}"
    yield _divergence(logs, "", title, runs.map(lambda run: _at(run, place)), Cause.ORDER_FORWARD, "")


def lonely_groups(logs: DomainLogs) -> Iterator[Divergence]:
    """A collective that one rank issues in a process group of its own, where its peers use a group of a different name.

    Two groups with equal members are two groups: on NCCL each has its own communicator.
    """
    if not logs.is_whole:
        return  # a peer may have been in the group
    lonely = _used_by_one(logs)
    for step in logs.steps():
        place = _first_lonely(step, lonely)
        if place is not None:
            yield _in_other_groups(logs, step, place)
            return


def _first_lonely(step: Step, lonely: set[str]) -> int | None:
    """Number of the first collective of a compile that one rank issues in a group which no other rank uses."""
    issued = step.compiles.map(lambda compile_: compile_.issued)
    columns = zip(*issued.values(), strict=False)
    return next((number for number, calls in enumerate(columns) if _is_lonely(calls, lonely)), None)


def _in_other_groups(logs: DomainLogs, step: Step, place: int) -> Divergence:
    calls = step.compiles.map(lambda compile_: compile_.issued[place])
    return _divergence(
        logs,
        f"compile of {step.frame}",
        f"collective number {place} is issued in process groups of different names",
        calls.map(lambda call: f"{call[0]} in group {call[1]!r}"),
        Cause.GROUP,
        Cause.GROUP.advice,
        lines=_lines(step),
    )


def _used_by_one(logs: DomainLogs) -> set[str]:
    """Process groups that the compiled code of exactly one rank names."""
    users = Counter(itertools.chain.from_iterable(member.log.coupling for member in logs.members.values()))
    return {name for name, number in users.items() if number == 1}


def _is_lonely(calls: Sequence[tuple[str, str]], lonely: set[str]) -> bool:
    """True when ranks issue one collective in groups of different names, one of which a single rank uses."""
    ops, groups = map(set, zip(*calls, strict=True))
    return len(ops) == 1 and len(groups) > 1 and not groups.isdisjoint(lonely)


def _flat(schedules: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Collectives as scheduled, without the waits, whose places may differ between ranks."""
    names = [name.removeprefix(_OP) for name in itertools.chain.from_iterable(schedules)]
    return tuple(name for name in names if not name.startswith(_WAIT))


def _run(member: Member) -> tuple[str, ...]:
    """The graphs with collectives that a rank ran, named by frame and collectives, not by compile id."""
    by_id = {compile_.compile_id: compile_ for compile_ in member.log.compiles}
    ran = [by_id[name] for name in itertools.chain.from_iterable(member.log.executions) if name in by_id]
    return tuple(_program(member, compile_) for compile_ in ran if compile_.issued)


def _program(member: Member, compile_: LoggedCompile) -> str:
    issued = [f"{op} in {role}" for op, role in member.issued(compile_)]
    return f"{compile_.frame} with {', '.join(issued)}"


def _first_difference(orders: Orders) -> int:
    """The first place at which the ranks differ; a rank may have nothing there."""
    columns = zip(*orders.values(), strict=False)
    return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))


def _at(row: Sequence[str], place: int) -> str:
    return row[place] if place < len(row) else f"nothing, {len(row)} in all"


def _lines(step: Step) -> ByRank[UserLine | None]:
    return step.compiles.map(lambda compile_: compile_.line)


def _divergence(
    logs: DomainLogs,
    where: str,
    title: str,
    said: ByRank[str],
    cause: Cause,
    advice: str,
    *,
    lines: Mapping[int, UserLine | None] = MappingProxyType({}),
) -> Divergence:
    """The finding: what each rank has, and the line."""
    sides = said.groups(str)
    differing = " against ".join(f"{said[ranks[0]]} on {named_ranks(ranks)}" for ranks in sides)
    return Divergence(
        layer=Layer.COLLECTIVES,
        cls=DivergenceClass.COLLECTIVES,
        domain=logs.domain.name,
        where=where,
        groups=tuple(
            RankGroup(ranks=ranks, item=value_item(title, said[ranks[0]]), frame_line=lines.get(ranks[0]))
            for ranks in sides
        ),
        title=f"{title}: {differing}",
        cause=cause,
        advice=advice,
    )
