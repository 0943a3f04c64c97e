"""Digests of all ranks -> checks of any program, each with expected and observed."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from textwrap import shorten
from typing import TypeVar

from tpcompile.evidence.digests.split_regions import region_check
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import find, first, grouped
from tpcompile.evidence.records import Check, CheckId, Divergence, GraphBreak, Item, Layer, RankDigest, Status, UserLine
from tpcompile.evidence.records.base import known
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks

LIVE_ONLY = frozenset({
    CheckId.TIMED_OUT, CheckId.ALIVE, CheckId.AGREED, CheckId.NO_ERROR, CheckId.MACHINE, CheckId.ARRIVED,
    CheckId.TOGETHER, CheckId.MOVING, CheckId.SAME_BRANCHES, CheckId.EQUAL_VALUES, CheckId.GROUPS,
})  # fmt: skip
"""Checks that only the live run can do; a replay keeps their outcome."""
CAUSES = LIVE_ONLY - {CheckId.TOGETHER} | {CheckId.REPORTED, CheckId.UNBROKEN, CheckId.COMPILED}
"""Checks whose failure explains divergences; divergences explain the failure of all other checks."""
_SEEN_EARLY = frozenset({CheckId.UNBROKEN, CheckId.LAYER, CheckId.TP_AWARE})
"""Checks whose failure is certain before the run has ended."""

_MAX_EXPLANATION = 100
AGREE = "equal on all ranks"
_OUTPUT, _OF_PARAMETER = "forward", " of "
"""`forward`, `forward.1`, `forward NAME` are outputs; `forward exp_avg of NAME` is what a step made of a parameter."""

K = TypeVar("K", bound=Hashable)
Ranks = ByRank[RankDigest]


def digests_by_rank(digests: Iterable[RankDigest]) -> Ranks:
    """The digest of every rank that has one."""
    return ByRank({digest.rank: digest for digest in digests})


def captured(
    digests: Sequence[RankDigest], divergences: Sequence[Divergence], *, num_breaks: int | None = 0
) -> list[Check]:
    """Checks of any program: several graphs are fine, graph breaks and differences between ranks are not.

    `num_breaks`: places at which the graphs may break, over all phases; None for any number.
    """
    ranks = digests_by_rank(digests)
    phases = _once(ranks.map(lambda digest: _phases(digest, "")))
    if num_breaks == 0:
        names = {phase: f"graph breaks in {phase}" if phase else "graph breaks" for phase in phases}
        breaks = [
            no_breaks("", phase, ranks, frames=False, id=CheckId.FEW_BREAKS, name=name) for phase, name in names.items()
        ]
    else:
        breaks = [_expected_breaks(ranks, num_breaks)]
    accepted = [] if any(check.is_red for check in breaks) else list(_all_breaks(ranks))
    return [
        any_compiled("", ranks),
        *breaks,
        region_check("", digests, phases=phases, accepted=accepted),
        *agreement("", ranks, divergences),
        tp_aware("", ranks),
        kept("", ranks),
    ]


def agreed(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Checks of a program in mid-run: what the ranks compiled so far is the same."""
    return agreement("", digests_by_rank(digests), divergences)


def ended_early(judged: Sequence[Check]) -> list[Check]:
    """Checks of a run that was stopped: a failure that the early end may explain is skipped, any other stays red."""
    found: list[Check] = []
    for check in judged:
        is_open = check.is_red and check.id not in _SEEN_EARLY
        found.append(check.changed(status=Status.SKIPPED, ranks=()) if is_open else check)
    return found


def any_compiled(mode: str, ranks: Ranks) -> Check:
    """Check that something was compiled, on every rank."""
    graphs = ranks.map(lambda digest: sum(num_graphs(digest, phase) for phase in _phases(digest, mode)))
    none = graphs.where(lambda count: count == 0)
    observed = values_text(graphs, "graph")
    expected = "at least 1 graph on every rank"
    # Where only some ranks compiled nothing the ranks disagree: a different failure from "nothing was compiled".
    if len(none) < len(ranks):
        return make_check(mode, CheckId.EVERY_RANK_COMPILED, none, expected, observed, cause=Cause.COMPILE_DISABLED)
    return make_check(mode, CheckId.COMPILED, none, expected, observed, cause=Cause.NOTHING_COMPILED)


def no_breaks(
    mode: str, phase: str, ranks: Ranks, *, frames: bool = True, id: CheckId = CheckId.UNBROKEN, name: str = ""
) -> Check:
    """Check that a phase has no graph breaks, by counter, frames and trace events: each alone misses some breaks."""
    evidence = ranks.map(lambda digest: _break_evidence(digest, phase, frames=frames)).where(bool)
    breaks = _users_first(_once(ranks.map(lambda digest: digest.breaks_in(phase))))
    check = make_check(
        mode,
        id,
        evidence,
        "0 breaks on every rank",
        first(evidence.values()) or "0",
        cause=Cause.GRAPH_BREAK,
        details=[f"{found.line}: {found.reason}" for found in breaks],
        line=first(known(found.line for found in breaks)),
        name=name,
    )
    return _of_library(check, breaks) if check.is_red else check


def _users_first(breaks: Iterable[GraphBreak]) -> list[GraphBreak]:
    """The breaks, those of the user's own code first: these the user can remove."""
    return sorted(breaks, key=lambda found: bool(found.library))


def _of_library(check: Check, breaks: Sequence[GraphBreak]) -> Check:
    """The failed check, which says so where all breaks are in code of torch or of an installed package."""
    places = list(dict.fromkeys(found.library for found in breaks))
    is_users = not places or "" in places
    if is_users:
        return check
    inside = ", ".join(places)
    advice = (
        f"The graph breaks in {inside}: move the call out of the compiled region, or expect the break with "
        "tpcompile.capture(num_breaks=...)."
    )
    return check.changed(is_of_library=True, advice=advice)


def _all_breaks(ranks: Ranks) -> dict[GraphBreak, None]:
    return _once(ranks.map(lambda digest: [found for _, found in digest.breaks]))


def _expected_breaks(ranks: Ranks, num_breaks: int | None) -> Check:
    """Check that the graphs break at as many places as expected, None for any number."""
    places = ranks.map(lambda digest: {(found.line, found.reason) for _, found in digest.breaks})
    numbers = places.map(len)
    breaks = _users_first(_all_breaks(ranks))
    observed = values_text(numbers, "break")
    bad: ByRank[int] = ByRank({})
    expected = "any number"
    if num_breaks is not None:
        bad = numbers.where(lambda number: number != num_breaks)
        expected = f"{_value_text(num_breaks, 'break')} on every rank"
    check = make_check(
        "",
        CheckId.FEW_BREAKS,
        bad,
        expected,
        observed,
        cause=Cause.GRAPH_BREAK,
        details=[f"{found.line}: {found.reason}" for found in breaks],
        line=first(known(found.line for found in breaks)),
    )
    advice = f"Remove the breaks that are not meant, or give the number that is: num_breaks={num_breaks} is expected."
    return check.changed(advice=advice) if check.is_red else check


def _break_evidence(digest: RankDigest, phase: str, *, frames: bool) -> str:
    """What shows graph breaks of one rank in a phase, torch's explanation first; empty for none."""
    breaks = _users_first(digest.breaks_in(phase))
    if breaks:
        explained = breaks[0].reason.rpartition("Explanation: ")[2]
        number = _value_text(len(breaks), "break")
        if len(breaks) > 1:
            number = f"{number}, the first"
        if breaks[0].library:
            number = f"{number} in {breaks[0].library}"
        return f"{number}: {shorten(explained, _MAX_EXPLANATION, placeholder='...')}"
    counters = digest.counters_of(phase)
    if counters.breaks:
        return f"break counter {counters.breaks}"
    has_more_frames = counters.frames > max(1, counters.graphs)
    if frames and has_more_frames:
        return f"{counters.frames} frames compiled into {_value_text(counters.graphs, 'graph')}"
    return ""


def agreement(mode: str, ranks: Ranks, divergences: Sequence[Divergence]) -> list[Check]:
    """One check per layer: equal in every symmetry domain, or the first difference."""
    observed = {Layer.ENVIRONMENT, *_once(ranks.map(lambda digest: digest.observed))}
    mine: list[Divergence] = []
    for divergence in divergences:
        is_of_run = not divergence.where
        if is_of_run or divergence.where.startswith(phase_prefix(mode)):
            mine.append(divergence)
    return [_layer_check(mode, layer, mine, is_observed=layer in observed) for layer in Layer]


def _layer_check(mode: str, layer: Layer, divergences: Sequence[Divergence], *, is_observed: bool) -> Check:
    """The check of one layer: red for a difference in it, or as the consequence of one in a different layer."""
    by_layer = grouped(divergences, lambda found: (found.layer, found.is_red))
    red = by_layer.get((layer, True), [])
    listed = by_layer.get((layer, False), [])
    titles = [found.title for found in (*red[1:], *listed)]
    kinds = dict.fromkeys(found.cls for found in listed)
    noted = f" ({'; '.join(kinds)})" if kinds else ""
    agrees = _agrees(mode, layer, titles, noted, is_observed=is_observed)
    if red:
        return agrees.changed(**_failed_by(red[0], red[0].title), line=red[0].line)
    cause = find(divergences, lambda found: found.is_red and layer in found.consequences)
    if cause is None:
        return agrees
    observed = f"differs, a consequence of the {cause.layer}{noted}"
    return agrees.changed(**_failed_by(cause, observed), is_consequence=True)


def _failed_by(cause: Divergence, observed: str) -> dict[str, object]:
    """Fields of a check that failed because of this difference."""
    known = cause.culprits
    ranks = {"ranks": known or cause.ranks, "is_rank_known": bool(known)}
    return {"status": Status.FAIL, "cause": cause.cause, "observed": observed, **ranks}


def _agrees(mode: str, layer: Layer, titles: Sequence[str], noted: str, *, is_observed: bool) -> Check:
    """The check of a layer in which nothing is red."""
    status, observed = (Status.PASS, "equal") if is_observed else (Status.SKIPPED, "not observed")
    return Check(
        id=CheckId.LAYER,
        layer=layer,
        name=f"{layer} {AGREE}",
        mode=mode,
        status=status,
        expected="equal shapes, strides, dtypes" if layer == Layer.INPUTS else "equal",  # their values are data
        observed=f"{observed}{noted}",
        details=tuple(dict.fromkeys(titles)),
    )


def tp_aware(mode: str, ranks: Ranks) -> Check:
    """Check that all that others than torch run on a shard is registered or declared to be correct there."""
    found = ranks.map(lambda digest: digest.refused_ops).where(bool)
    return refused_check(mode, found, statuses=_once(ranks.map(lambda digest: digest.fast_paths)))


def refused_check(mode: str, found: Mapping[int, Sequence[Item]], *, statuses: Iterable[tuple[str, str]]) -> Check:
    """The check of what each rank refused; `statuses` says what became of each op, kernel, pass and backend."""
    statuses = tuple(statuses)
    subjects = _by_subject(found)
    by_outcome = grouped(statuses, lambda named: named[1].partition(":")[0])
    allowed = []
    for outcome in ("used", "declared"):
        names = [name for name, _ in by_outcome.get(outcome, [])]
        if names:
            allowed.append(f"{outcome}: {', '.join(names)}")
    places = [
        f"{refused.about} is defined at {refused.notes.get('defined', '?')}, {how_used(refused)}"
        for refused in subjects.values()
    ]
    return make_check(
        mode,
        CheckId.TP_AWARE,
        found,
        "only TP-aware ones",
        ", ".join(subjects) or "; ".join(allowed) or "none refused",
        details=[f"{name}: {status}" for name, status in statuses],
        on_failure=[
            *places,
            "declare what is named here once it is right on a shard: "
            "gate.tp_aware_ops, or tp_aware of Target, capture and Sentinel",
        ],
        line=_first_line(subjects),
    )


def how_used(refused: Item) -> str:
    """How a compiled program comes to run what was refused."""
    return refused.notes.get("how") or f"called at {refused.line}"


def kept(mode: str, ranks: Ranks) -> Check:
    """Check that no in-place all-reduce clobbers a live buffer."""
    found = ranks.map(lambda digest: digest.overwritten).where(bool)
    subjects = _by_subject(found)
    overwriting = f"{', '.join(subjects)} reduces a concatenation in place whose parts are read afterwards"
    check = make_check(
        mode,
        CheckId.CLOBBERED,
        found,
        "reduced buffers share no memory with live tensors",
        overwriting if subjects else "none",
        on_failure=["an Inductor bug: repro/inductor_all_reduce_of_cat.py has a workaround"],
        line=_first_line(subjects),
    )
    if Layer.KERNELS in _once(ranks.map(lambda digest: digest.observed)):
        return check
    return check.changed(status=Status.SKIPPED, observed="not observed")


def _by_subject(found: Mapping[int, Iterable[Item]]) -> dict[str, Item]:
    return {item.about: item for item in itertools.chain.from_iterable(found.values())}


def _first_line(found: Mapping[str, Item]) -> UserLine | None:
    item = first(found.values())
    return item.line if item else None


def _once(found: Mapping[int, Iterable[K]]) -> dict[K, None]:
    """The values of all ranks, each once, in order of the ranks."""
    return dict.fromkeys(itertools.chain.from_iterable(found.values()))


def phase_prefix(mode: str) -> str:
    """The prefix of a mode's phase names; empty for all modes."""
    return f"{mode}/" if mode else ""


def _phases(digest: RankDigest, mode: str) -> list[str]:
    phases = [counters.phase for counters in digest.counters]
    return [phase for phase in phases if phase.startswith(phase_prefix(mode))]


def num_graphs(digest: RankDigest, phase: str) -> int:
    """Number of graphs of a phase: the larger of Dynamo's counter and of the graphs in the trace."""
    compiles = [compile_ for compile_ in digest.compiles if compile_.phase == phase]
    traced = sum(compile_.sha(Layer.COLLECTIVES) is not None for compile_ in compiles)
    return max(digest.counters_of(phase).graphs, traced)


def values_text(values: Mapping[int, object], unit: str = "") -> str:
    """`{0: 1, 1: 1, 2: 3}` -> `1 (ranks 0-1), 3 (rank 2)`; only the value where it is equal on all ranks."""
    groups = grouped(values, lambda rank: _value_text(values[rank], unit))
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"{value} ({named_ranks(ranks)})" for value, ranks in groups.items())


def _value_text(value: object, unit: str) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if not unit:
        return text
    return f"{text} {unit}" if value == 1 else f"{text} {unit}s"


def make_check(
    mode: str,
    id: CheckId,
    bad: Iterable[int],
    expected: str,
    observed: str,
    *,
    name: str = "",
    cause: Cause = Cause.UNKNOWN,
    details: Sequence[str] = (),
    on_failure: Sequence[str] = (),
    line: UserLine | None = None,
) -> Check:
    """A check that fails if any rank is bad, with that cause and the details `on_failure`."""
    ranks = tuple(sorted(set(bad)))
    passed = Check(
        id=id,
        name=name,
        mode=mode,
        status=Status.PASS,
        expected=expected,
        observed=observed,
        details=tuple(details),
        line=line,
    )
    if not ranks:
        return passed
    return passed.changed(status=Status.FAIL, ranks=ranks, cause=cause, details=(*details, *on_failure))


def undecided(is_judged: Mapping[str, bool]) -> list[str]:
    """Of tensors by name those that decide nothing, where that leaves the comparison undecided; else empty.

    It does where an output decides nothing, or most of all tensors. A few gradients are often nothing but rounding:
    that of a bias in front of a softmax is zero.
    """
    names = [name for name, judged in is_judged.items() if not judged]
    is_open = any(name.startswith(_OUTPUT) and _OF_PARAMETER not in name for name in names)
    return names if is_open or 2 * len(names) > len(is_judged) else []
