"""What was scheduled and what ran, by the logs -> divergences: evidence besides the graphs.

Inductor may reorder and bucket collectives on each rank alone, and a program may call its graphs in a different
order; the graphs of all ranks are equal then, and the job hangs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import num_equal
from tpcompile.evidence.logs.job import DomainLogs, Member
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, RankGroup, UserLine, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks

_OP = "torch.ops._c10d_functional."
_WAIT = "wait_tensor"


def scheduled(logs: DomainLogs) -> Iterator[Divergence]:
    """Compiles for which Inductor scheduled different collectives, or a different order of them, on some ranks."""
    for step in logs.steps():
        logged = step.compiles.where(lambda compile_: compile_.schedules)
        # a part that was loaded from a cache has none: of lists of different length the corresponding ones are unknown
        if logged.differ(lambda compile_: len(compile_.schedules)):
            continue
        names = logged.map(lambda compile_: [name.removeprefix(_OP) for row in compile_.schedules for name in row])
        # The places of their waits may differ between ranks.
        orders = names.map(lambda row: tuple(name for name in row if not name.startswith(_WAIT)))
        if orders.differ(tuple):
            has_others = orders.differ(lambda order: tuple(sorted(order)))
            compile_id = step.compiles[orders.ranks[0]].compile_id
            place, said = _first_difference(orders)
            yield _divergence(
                logs,
                f"compile {compile_id} of {step.frame}",
                f"Inductor scheduled different collectives, first at number {place}",
                said,
                Cause.EXTRA_COLLECTIVE if has_others else Cause.ORDER_FORWARD,
                lines=step.compiles.map(lambda compile_: compile_.line),
            )


def executed(logs: DomainLogs) -> Iterator[Divergence]:
    """Compiled graphs with collectives that ranks ran in different orders, or not equally often."""
    if not logs.is_whole:
        return  # a run of a graph whose compile is damaged has no name
    runs = logs.members.where(lambda member: member.log.executions).map(_run)
    if runs.differ(tuple):
        place, said = _first_difference(runs)
        title = f"compiled graphs with collectives ran in a different order, first at number {place}"
        yield _divergence(logs, "", title, said, Cause.ORDER_FORWARD)


def _run(member: Member) -> tuple[str, ...]:
    """The graphs with collectives that a rank ran, named by frame and collectives, not by compile id."""
    programs: dict[str, str] = {}
    for compile_ in member.log.compiles:
        issued = [f"{op} in {role}" for op, role in member.issued(compile_)]
        programs[compile_.compile_id] = f"{compile_.frame} with {', '.join(issued)}" if issued else ""
    ran = (programs.get(compile_id) for compile_id in itertools.chain.from_iterable(member.log.executions))
    return tuple(filter(None, ran))


def lonely_groups(logs: DomainLogs) -> Iterator[Divergence]:
    """A collective that one rank issues in a process group of its own, where its peers use a group of a different name.

    Two groups with equal members are two groups: on NCCL each has its own communicator.
    """
    if not logs.is_whole:
        return  # a peer may have been in the group
    names = logs.members.map(lambda member: member.log.coupling)
    users = Counter(itertools.chain.from_iterable(names.values()))
    lonely = {name for name, number in users.items() if number == 1}
    for step in logs.steps():
        issued = step.compiles.map(lambda compile_: compile_.issued)
        place = _first_lonely(issued, lonely)
        if place is not None:
            yield _divergence(
                logs,
                f"compile of {step.frame}",
                f"collective number {place} is issued in process groups of different names",
                ByRank({rank: "{} in group {!r}".format(*calls[place]) for rank, calls in issued.items()}),
                Cause.GROUP,
                advice=Cause.GROUP.advice,
                lines=step.compiles.map(lambda compile_: compile_.line),
            )
            return


def _first_lonely(issued: ByRank[list[tuple[str, str]]], lonely: set[str]) -> int | None:
    """Number of the first collective that ranks issue in groups of different names, one of them in a lonely group."""
    for place, calls in enumerate(zip(*issued.values(), strict=False)):
        ops, groups = map(set, zip(*calls, strict=True))
        is_one_call = len(ops) == 1 and len(groups) > 1
        if is_one_call and not groups.isdisjoint(lonely):
            return place
    return None


def _first_difference(orders: ByRank[tuple[str, ...]]) -> tuple[int, ByRank[str]]:
    """The first place at which the ranks differ, and what each has there; a rank may have nothing there."""
    place = num_equal(orders.values())
    return place, orders.map(lambda row: row[place] if place < len(row) else f"nothing, {len(row)} in all")


def _divergence(
    logs: DomainLogs,
    where: str,
    title: str,
    said: ByRank[str],
    cause: Cause,
    *,
    advice: str = "",
    lines: Mapping[int, UserLine | None] = MappingProxyType({}),
) -> Divergence:
    """The finding; `said` is what each rank has, `lines` the line to show for it."""
    sides = said.sides()
    differing = " against ".join(f"{text} on {named_ranks(ranks)}" for ranks, text in sides)
    return Divergence(
        layer=Layer.COLLECTIVES,
        cls=DivergenceClass.COLLECTIVES,
        domain=logs.domain.name,
        where=where,
        groups=tuple(
            RankGroup(ranks=ranks, item=value_item(title, text), frame_line=lines.get(ranks[0]))
            for ranks, text in sides
        ),
        title=f"{title}: {differing}",
        cause=cause,
        advice=advice,
    )
