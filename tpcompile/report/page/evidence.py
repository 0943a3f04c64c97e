"""What a page is made of: the verdict of a run, the digests and items behind it, and what each rank did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tpcompile.evidence.groups.domain import Fetch
from tpcompile.evidence.records import CompileDigest, RankDigest, UserLine, Verdict

EventKind = Literal["compile", "recompile", "break", "calls", "collective", "message", "iteration", "end"]


@dataclass(frozen=True)
class Event:
    """One thing that a rank did."""

    kind: EventKind
    label: str
    start: float
    """Unix time, or its place in the order where the run has no clock."""
    end: float
    """Later than or equal to `start`."""
    detail: str = ""
    line: UserLine | None = None


class _Lenient(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Launch(_Lenient):
    """What generated code launches; sizes in bytes."""

    name: str
    role: str
    ops: tuple[str, ...] = ()
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    lines: tuple[UserLine, ...] = ()


class Pair(_Lenient):
    """Two nodes of the scheduler, and why they are not one kernel."""

    first: str
    second: str
    refused: tuple[str, ...] = ()


class Decisions(_Lenient):
    """What the scheduler decided for one graph."""

    pairs: tuple[Pair, ...] = ()


class FusedGraph(_Lenient):
    """The launches of one graph."""

    compile_id: str
    phase: str
    launches: tuple[Launch, ...] = ()
    decisions: Decisions | None = None


class Manifest(_Lenient):
    """Kernels of one rank, as `tpcompile.fusion` wrote them."""

    device: str = ""
    graphs: tuple[FusedGraph, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a run."""

    verdict: Verdict
    command: str
    """The command that judged it: `gate`, `diagnose`, `run`, ..."""
    name: str
    """Its run directory or the folder of its logs."""
    digests: Sequence[RankDigest] = ()
    fetch: Fetch = lambda _rank, _index, _layer, _part: ()
    events: Mapping[int, Sequence[Event]] = field(default_factory=dict)
    has_clock: bool = False
    """False where events have an order and no times."""
    manifests: Mapping[int, Manifest] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    """When, where and with what it ran."""
    notes: tuple[str, ...] = ()
    """What was left out or could not be read."""
    logs: Path | None = None
    """Folder of torch's logs, where there is one."""
    tlparse: Mapping[int, str] = field(default_factory=dict)
    """Rank -> address of the pages that tlparse made of its log."""


def kind_of(compile_: CompileDigest) -> EventKind:
    """Whether a compile was the first of its frame."""
    return "recompile" if compile_.recompile_reasons or compile_.limit_reached else "compile"


def in_order(digest: RankDigest) -> list[Event]:
    """Compiles, graph breaks and calls of a rank whose run has no clock, one after the other."""
    found: list[tuple[EventKind, str, str, UserLine | None]] = []
    for phase in dict.fromkeys([*(one.phase for one in digest.counters), *(one.phase for one in digest.compiles)]):
        for compile_ in digest.compiles:
            if compile_.phase == phase:
                why = "; ".join(compile_.recompile_reasons[:1])
                found.append((kind_of(compile_), f"{compile_.compile_id} {compile_.frame}", why, compile_.line))
        found += [("break", "graph break", broken.reason, broken.line) for broken in digest.breaks_in(phase)]
        calls = digest.counters_of(phase).calls
        if calls:
            found.append(("calls", f"{calls} calls" if calls > 1 else "1 call", phase, None))
    return [Event(kind, label, at, at + 1.0, detail, line) for at, (kind, label, detail, line) in enumerate(found)]


def together(evidence: Evidence, more: Mapping[int, Sequence[Event]]) -> dict[int, list[Event]]:
    """The events of a run with a clock, and more of them; a compile that both have is taken once."""
    ranks = sorted({*evidence.events, *more})
    found = {}
    for rank in ranks:
        known = list(evidence.events.get(rank, ()))
        has_compiles = any(event.kind in ("compile", "recompile") for event in known)
        added = [event for event in more.get(rank, ()) if not (has_compiles and event.kind in ("compile", "recompile"))]
        found[rank] = [*known, *added]
    return found


def since_first(events: Mapping[int, Sequence[Event]]) -> dict[int, list[Event]]:
    """The same events in order, with times since the first one of all ranks."""
    zero = min((event.start for of_rank in events.values() for event in of_rank), default=0.0)
    return {
        rank: [
            replace(one, start=one.start - zero, end=one.end - zero)
            for one in sorted(of_rank, key=lambda one: one.start)
        ]
        for rank, of_rank in events.items()
    }
