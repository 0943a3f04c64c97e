"""Digests of all ranks -> checks of any program, each with expected and observed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import Check, CheckId, Divergence, Layer, PhaseCounters, RankDigest, Status, UserLine
from tpcompile.evidence.splits import region_check
from tpcompile.evidence.text.ranks import ranks_text

COMPILED = "something was compiled"
TIMED_OUT = "finished in time"
ALIVE = "ranks alive"
AGREED = "same collectives before they run"
NO_ERROR = "exceptions"
ARRIVED = "every rank arrived"
REPORTED = "every rank reported"
UNBROKEN = "graph breaks"
TOGETHER = "every rank compiles together"
MOVING = "ranks make progress"
LIVE_ONLY = frozenset({TIMED_OUT, ALIVE, AGREED, NO_ERROR, ARRIVED, TOGETHER, MOVING})
"""Checks that only the live run can make; a replay keeps their outcome."""
CAUSES = LIVE_ONLY - {TOGETHER} | {REPORTED, UNBROKEN, COMPILED}
"""Checks whose failure explains a divergence, not the other way round."""

AGREE = "equal on all ranks"


def captured(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Any program of the user: it may be several graphs, but unbroken and the same on all ranks."""
    phases = dict.fromkeys(c.phase for d in digests for c in d.counters)
    broken = [no_breaks("", f"{UNBROKEN} in {phase}", phase, digests, frames=False) for phase in phases]
    layers = agreement("", digests, divergences)
    return [
        any_compiled("", digests),
        *broken,
        region_check("", digests, phases=phases),
        *layers,
        tp_aware("", digests),
        kept("", digests),
    ]


def agreed(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """A program in mid-run: what the ranks compiled so far is the same."""
    return agreement("", digests, divergences)


def ended_early(judged: Sequence[Check]) -> list[Check]:
    """Checks of a run that was stopped: what never happened is skipped, what was seen to be wrong stays red."""
    seen = [c for c in judged if c.name == UNBROKEN or c.name.endswith(AGREE)]
    return [
        c if c in seen or c.status != Status.FAIL else c.model_copy(update={"status": Status.SKIPPED, "ranks": ()})
        for c in judged
    ]


def any_compiled(mode: str, digests: Sequence[RankDigest]) -> Check:
    graphs = {d.rank: sum(num_graphs(d, phase) for phase in _phases(d, mode)) for d in digests}
    none = [rank for rank, count in graphs.items() if count == 0]
    # Some ranks only: the ranks disagree, which is another failure than "nothing compiled".
    is_everybody = len(none) == len(digests)
    name = COMPILED if is_everybody else "every rank compiled"
    found = make_check(mode, name, none, "at least 1 graph on every rank", values_text(graphs, "graph"))
    cause = Cause.NOTHING_COMPILED if is_everybody else Cause.COMPILE_DISABLED
    return found.model_copy(update={"cause": cause}) if none else found


def no_breaks(mode: str, name: str, phase: str, digests: Sequence[RankDigest], *, frames: bool = True) -> Check:
    """Counter, frames and trace events all say so: any one alone misses leading or trailing breaks."""
    evidence = {d.rank: _break_evidence(d, phase, frames=frames) for d in digests}
    bad = [rank for rank, text in evidence.items() if text]
    events = [b for d in digests for p, b in d.breaks if p == phase]
    first = next((b for b in events if b.line), events[0] if events else None)
    found = make_check(
        mode, name, bad, "0 breaks on every rank", evidence[bad[0]] if bad else "0",
        details=[f"{b.line}: {b.reason}" for b in dict.fromkeys(events)], line=first.line if first else None,
    )  # fmt: skip
    return found.model_copy(update={"cause": Cause.GRAPH_BREAK}) if bad else found


def _break_evidence(digest: RankDigest, phase: str, *, frames: bool) -> str:
    counters = counters_of(digest, phase)
    events = [b for p, b in digest.breaks if p == phase]
    said = []
    if counters.breaks:
        said.append(f"break counter {counters.breaks}")
    if events:
        said.append(f"break events {len(events)}")
    if frames and counters.frames > max(1, counters.graphs):
        said.append(f"frames {counters.frames} for graphs {counters.graphs}")
    return ", ".join(said)


def agreement(mode: str, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """One check per layer: equal in the symmetry domain, or the first difference."""
    found = []
    for layer in Layer:
        mine = [d for d in divergences if d.layer == layer and _of_mode(d, mode)]
        red = [d for d in mine if d.is_red]
        noted = [d for d in mine if not d.is_red]
        first = red[0] if red else None
        hashed = {x.layer for d in digests for c in d.compiles for x in c.layers}
        seen = layer == Layer.ENVIRONMENT or layer in hashed
        cause = next((d for d in divergences if d.is_red and layer in d.consequences and _of_mode(d, mode)), None)
        blamed = first or cause
        observed = first.title if first else "equal" if seen else "not observed"
        if cause and not first:
            observed = f"differs, a consequence of the {cause.layer}"
        if noted and not first:
            observed += f" ({'; '.join(dict.fromkeys(d.cls for d in noted))})"
        found.append(
            make_check(
                mode, f"{layer} {AGREE}", [], "equal", observed,
                status=Status.FAIL if blamed else Status.PASS if seen else Status.SKIPPED,
                details=[d.title for d in (*red[1:], *noted)],
                line=first.line if first else None,
                ranks=blamed.groups[-1].ranks if blamed else (),
            ).model_copy(
                update={
                    "id": CheckId.LAYER,
                    "layer": layer,
                    "cause": blamed.cause if blamed else Cause.UNKNOWN,
                    "is_consequence": bool(cause and not first),
                }
            )
        )  # fmt: skip
    return found


def _of_mode(divergence: Divergence, mode: str) -> bool:
    return not mode or not divergence.where or divergence.where.startswith(f"{mode}/")


def tp_aware(mode: str, digests: Sequence[RankDigest]) -> Check:
    found = {item.about: item for d in digests for item in d.undeclared_ops}
    first = next(iter(found.values()), None)
    return make_check(
        mode, "undeclared custom ops and Triton kernels", [d.rank for d in digests if d.undeclared_ops],
        "only ops declared TP-aware",
        ", ".join(found) if found else "none",
        details=["declare it with gate.tp_aware_ops once its maths is right on a shard"] if found else [],
        line=first.line if first else None,
    )  # fmt: skip


def kept(mode: str, digests: Sequence[RankDigest]) -> Check:
    found = {item.about: item for d in digests for item in d.overwritten}
    first = next(iter(found.values()), None)
    is_seen = any(layer.layer == Layer.KERNELS for d in digests for c in d.compiles for layer in c.layers)
    return make_check(
        mode, "reduces that overwrite what is read later", [d.rank for d in digests if d.overwritten],
        "reduced buffers share no memory with live tensors",
        f"{', '.join(found)} reduces a concatenation in place whose parts are read afterwards"
        if found else "none does" if is_seen else "not observed",
        status=None if is_seen else Status.SKIPPED,
        details=["an Inductor bug: repro/inductor_all_reduce_of_cat.py says what helps"] if found else [],
        line=first.line if first else None,
    )  # fmt: skip


def _phases(digest: RankDigest, mode: str) -> list[str]:
    return [c.phase for c in digest.counters if not mode or c.phase.startswith(f"{mode}/")]


def counters_of(digest: RankDigest, phase: str) -> PhaseCounters:
    return next((c for c in digest.counters if c.phase == phase), PhaseCounters(phase=phase))


def num_graphs(digest: RankDigest, phase: str) -> int:
    """Graphs of a phase, the larger of Dynamo's counter and of the graphs in the trace."""
    traced = sum(c.phase == phase and any(x.layer == Layer.COLLECTIVES for x in c.layers) for c in digest.compiles)
    return max(counters_of(digest, phase).graphs, traced)


def values_text(values: dict[int, Any], unit: str = "") -> str:
    """`{0: 1, 1: 1, 2: 3}` -> `1 (ranks 0-1), 3 (rank 2)`; one value for all ranks is just the value."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        groups.setdefault(f"{text} {unit}{'' if not unit or value == 1 else 's'}".strip(), []).append(rank)
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"{value} (rank {ranks_text(ranks)})" for value, ranks in groups.items())


def make_check(
    mode: str,
    name: str,
    bad: Iterable[int],
    expected: str,
    observed: str,
    *,
    status: Status | None = None,
    details: Sequence[str] = (),
    line: UserLine | None = None,
    ranks: Sequence[int] = (),
) -> Check:
    blamed = tuple(sorted(set(bad))) or tuple(ranks)
    return Check(
        name=name,
        mode=mode,
        status=status or (Status.FAIL if blamed else Status.PASS),
        expected=expected,
        observed=observed,
        details=tuple(details),
        line=line,
        ranks=blamed,
    )
