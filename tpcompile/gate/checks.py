"""Digests of all ranks -> the checks of modes A, B and C; torch-free, since a replay makes them again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tpcompile.choices import TARGET, AnyMode
from tpcompile.config import JobConfig, RunConfig
from tpcompile.evidence.digests.entered_regions import entered_check
from tpcompile.evidence.digests.split_regions import region_check
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.judgement.checks import (
    Ranks,
    agreement,
    any_compiled,
    digests_by_rank,
    kept,
    make_check,
    no_breaks,
    num_graphs,
    tp_aware,
    undecided,
    values_text,
)
from tpcompile.evidence.records import Check, CheckId, Divergence, RankDigest, Status, earliest, multiple_text
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.evidence.text.reasons import in_one_line
from tpcompile.fusion.baseline import Outcome
from tpcompile.gate import beside, wrong_numbers
from tpcompile.gate.measurements import Declared, GateFacts, GradientFactor, Schedule, TensorError

FIRST, STEADY, RESIZED = "first", "steady", "resized"
_LARGE = 1000
"""Ratio of errors from which on its digits say nothing."""
COMPARED = ("C", TARGET)
"""Modes in which all ranks must compile the same."""
Facts = ByRank[GateFacts]
Judge = Callable[[Any, Sequence[RankDigest], Sequence[Divergence]], list[Check]]


def mode_a(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode A must break the graph at every call site of a collective."""
    _ = config, divergences
    ranks = digests_by_rank(digests)
    if not ranks:
        return []
    breaks = _facts(ranks).map(lambda facts: facts.breaks)
    sites, per_forward = breaks.first.sites, breaks.first.collectives_per_forward
    if not per_forward:
        expected = "collectives in the block"
        return [_not_made("A", CheckId.BREAKS_EVERYWHERE, Status.SKIPPED, expected, "none: tp is 1")]
    missing = breaks.map(lambda found: found.unbroken(sites)).where(bool)
    regions = breaks.map(lambda found: found.regions_per_forward)
    return [
        any_compiled("A", ranks),
        make_check(
            "A",
            CheckId.BREAKS_EVERYWHERE,
            missing,
            f"{len(sites)} sites: {', '.join(sites)}",
            f"missing: {missing.first}" if missing else f"breaks, as expected: at all {len(sites)} sites",
        ),
        make_check(
            "A",
            CheckId.MANY_REGIONS,
            regions.where(lambda count: count <= per_forward),
            f"more than {per_forward}",
            values_text(regions),
        ),
    ]


def mode_b(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode B must have one graph and a right forward, and a gradient that is multiplied by the world size."""
    ranks = digests_by_rank(digests)
    facts = _facts(ranks)
    return [
        any_compiled("B", ranks),
        *_graphs("B", ranks),
        *agreement("B", ranks, divergences),
        _errors(config, facts, "B", CheckId.FORWARD, only="forward"),
        _gradient_factor(facts),
    ]


def mode_c(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode C must pass every check: one graph, equal ranks, no recompile, right forward and gradients."""
    ranks = digests_by_rank(digests)
    facts = _facts(ranks)
    numbers = [
        _errors(config, facts, "C", CheckId.FORWARD, only="forward"),
        *([_errors(config, facts, "C", CheckId.GRADIENTS, only="grad")] if config.train else []),
        _errors(config, facts, "C", CheckId.EAGER, only="eager"),
    ]
    return [
        any_compiled("C", ranks),
        *_graphs("C", ranks),
        region_check("C", digests, phases=[f"C/{name}" for name in (FIRST, STEADY, RESIZED)]),
        _steady(config, ranks, "C", divergences),
        *_resized(ranks, "C", divergences, f"{config.block.seq_len} to {config.resized_seq_len} tokens"),
        *agreement("C", ranks, divergences),
        _schedule(facts),
        *wrong_numbers.with_compiler("C", facts, numbers),
        *_replays(config, facts),
        tp_aware("C", ranks),
        kept("C", ranks),
        *_fusion(config, facts, "C"),
    ]


def target(config: JobConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """The checks of mode C for the user's own program, as far as the target declares what they need."""
    ranks = digests_by_rank(digests)
    facts = _facts(ranks)
    declared = facts.first.declared if facts else Declared()
    phases = [f"{TARGET}/{name}" for name in (FIRST, STEADY, RESIZED)]
    numbers: list[Check] = []
    if declared.has_reference:
        right = _errors(config, facts, TARGET, CheckId.FORWARD, only="forward")
        if right.is_red and not any(known.wrong_compiled for known in facts.values()):
            right = right.changed(details=(wrong_numbers.differing(ranks), *right.details))
        numbers.append(right)
        numbers.append(_errors(config, facts, TARGET, CheckId.EAGER, only="eager"))
        numbers = wrong_numbers.with_compiler(TARGET, facts, numbers)
    else:
        why = "no reference is declared: the numbers were not compared"
        numbers.append(_not_made(TARGET, CheckId.FORWARD, Status.SKIPPED, "a reference", why))
    return [
        any_compiled(TARGET, ranks),
        *_graphs(TARGET, ranks, expected=declared.num_graphs),
        region_check(TARGET, digests, phases=phases),
        entered_check(TARGET, digests, phases=phases),
        _steady(config, ranks, TARGET, divergences),
        *(_resized(ranks, TARGET, divergences, "as declared") if declared.has_resized else ()),
        *agreement(TARGET, ranks, divergences),
        *numbers,
        tp_aware(TARGET, ranks),
        kept(TARGET, ranks),
        *_fusion(config, facts, TARGET),
    ]


def timings(digests: Sequence[RankDigest]) -> dict[str, float]:
    """Slowest rank's median ms per call, by mode."""
    slowest: dict[str, float] = {}
    for facts in _facts(digests_by_rank(digests)).values():
        for mode, median_ms in facts.median_ms.items():
            slowest[mode] = max(median_ms, slowest.get(mode, 0.0))
    return dict(sorted(slowest.items()))


def _facts(ranks: Ranks) -> Facts:
    return ranks.map(lambda digest: GateFacts.model_validate(digest.facts))


def _not_made(mode: str, id: CheckId, status: Status, expected: str, observed: str) -> Check:
    """A check for which nothing was measured on any rank."""
    return Check(id=id, mode=mode, status=status, expected=expected, observed=observed)


def _reasons(ranks: Ranks, phase: str) -> list[str]:
    return [
        f"rank {rank}: {in_one_line(reason)}"
        for rank, digest in ranks.items()
        for where, reason in digest.recompile_reasons
        if where == phase
    ]


def _graphs(mode: str, ranks: Ranks, *, expected: int | None = 1) -> list[Check]:
    """The checks of the first call: as many graphs as expected, None for any number, and no breaks."""
    phase = f"{mode}/{FIRST}"
    graphs = ranks.map(lambda digest: num_graphs(digest, phase))
    counted: list[Check] = []
    if expected is not None:
        bad = graphs.where(lambda count: count != expected)
        name, asked = "", "1 graph on every rank"
        if expected != 1:
            name, asked = "number of graphs", f"{expected} graphs on every rank"
        counted.append(make_check(mode, CheckId.GRAPHS, bad, asked, values_text(graphs), name=name))
    breaks = no_breaks(mode, phase, ranks, frames=expected == 1)
    return [*counted, breaks]


def _gradient_factor(facts: Facts) -> Check:
    """The gradient of an in-place all-reduce is right in eager, and multiplied by the world size when compiled."""
    world = len(facts)
    if world == 1:
        return _not_made("B", CheckId.GRADIENT_FACTOR, Status.SKIPPED, "tp > 1", "tp is 1")
    factors = facts.map(lambda known: known.gradient_factor)
    expected = GradientFactor(eager=1.0, compiled=float(world))
    eager = values_text(factors.map(lambda factor: factor.eager))
    compiled = values_text(factors.map(lambda factor: factor.compiled))
    return make_check(
        "B",
        CheckId.GRADIENT_FACTOR,
        factors.where(lambda factor: factor != expected),
        f"gradient factor 1 in eager, {world} compiled",
        f"{eager} in eager, {compiled} compiled",
    )


def _steady(config: JobConfig, ranks: Ranks, mode: AnyMode, divergences: Sequence[Divergence]) -> Check:
    phase, steady_calls = f"{mode}/{STEADY}", config.gate.steady_calls
    apart = beside.first_compiles(ranks, phase, divergences)

    def num_compiles(digest: RankDigest) -> int:
        return max(digest.counters_of(phase).frames, num_graphs(digest, phase)) - len(apart[digest.rank])

    compiles = ranks.map(num_compiles)
    calls = ranks.map(lambda digest: digest.counters_of(phase).calls)
    return make_check(
        mode,
        CheckId.STEADY,
        [*compiles.where(bool), *calls.where(lambda count: count != steady_calls)],
        f"0 compiles in {steady_calls} calls",
        f"{values_text(compiles, 'compile')} in {values_text(calls, 'call')}{beside.text(apart)}",
        details=_reasons(ranks, phase),
    )


def _resized(ranks: Ranks, mode: AnyMode, divergences: Sequence[Divergence], change: str) -> list[Check]:
    phase = f"{mode}/{RESIZED}"
    apart = beside.first_compiles(ranks, phase, divergences)
    graphs = ranks.map(lambda digest: num_graphs(digest, phase) - len(apart[digest.rank]))
    having = Counter(graphs.values())
    usual = max(sorted(having), key=lambda count: having[count], default=0)  # of equally frequent ones the smallest
    never = ranks.where(lambda digest: digest.counters_of(phase).calls == 0).ranks
    odd = [*graphs.where(lambda count: count != usual), *graphs.where(lambda count: count > 1)]
    never_called = f"; never called on {named_ranks(never)}" if never else ""
    return [
        make_check(
            mode,
            CheckId.RESIZED,
            [*odd, *never],
            f"at most 1 compile, on all ranks ({change})",
            f"{values_text(graphs, 'compile')}{never_called}{beside.text(apart)}",
            on_failure=_reasons(ranks, phase),
        ),
        no_breaks(mode, phase, ranks, id=CheckId.UNBROKEN_RESIZED),
    ]


def _schedule(facts: Facts) -> Check:
    schedules = facts.map(lambda known: known.schedule)
    wrong = schedules.where(lambda schedule: schedule.compiled != schedule.declared)
    declared = first(schedules.values()) or Schedule()
    shown = first(wrong.values()) or declared
    number = len(declared.declared)
    observed = shown.first_difference if wrong else f"the same {number}"
    lines = dict.fromkeys(shown.lines)
    return make_check(
        "C",
        CheckId.SCHEDULE,
        wrong,
        f"{number} collectives, in order",
        observed,
        on_failure=[f"compiled at {line}" for line in lines],
    )


def _replays(config: RunConfig, facts: Facts) -> list[Check]:
    """Every call under `graphed` is a replay, of one CUDA graph for each length, and equals the compiled call."""
    if config.profile != "graphed":
        return []
    num_lengths = len({config.block.seq_len, config.resized_seq_len})
    replays = facts.map(lambda known: known.replays)
    wrong = [
        *replays.where(lambda found: found.captures != num_lengths),
        *replays.where(lambda found: found.replays != found.calls or found.calls == 0),
    ]
    captures = values_text(replays.map(lambda found: found.captures), "CUDA graph")
    calls = values_text(replays.map(lambda found: f"{found.replays} of {found.calls}"))
    expected = f"every call, of {num_lengths} CUDA graphs"
    return [
        make_check("C", CheckId.REPLAYS, sorted(set(wrong)), expected, f"{calls} calls, {captures}"),
        _errors(config, facts, "C", CheckId.REPLAYED, only="replayed"),
    ]


def _fusion(config: JobConfig, facts: Facts, mode: AnyMode) -> list[Check]:
    """Kernels and bytes against the baseline, if the run has one."""
    path = config.gate.fusion_baseline
    if path is None:
        return []
    expected = f"no more launches and bytes than in {path.name}"
    outcomes = facts.map(lambda known: known.fusion or Outcome(why_not="the run ended before"))
    unknown = first(outcome.why_not for outcome in outcomes.values() if outcome.why_not)
    if unknown or not outcomes:
        return [_not_made(mode, CheckId.FUSION, Status.FAIL, expected, f"not compared: {unknown}")]
    worse = outcomes.map(lambda outcome: outcome.regressions).where(bool)
    shown = first(one for regressions in worse.values() for one in regressions)
    is_better = any(outcome.better for outcome in outcomes.values())
    good = f"better: {path.name} is tightened, commit it" if is_better else "as in the baseline"
    return [
        make_check(
            mode, CheckId.FUSION, worse, expected, shown.text if shown else good,
            on_failure=list(dict.fromkeys(text for found in worse.values() for one in found for text in one.reasons)),
            line=shown.line if shown else None, cause=Cause.FUSION_REGRESSED,
        )
    ]  # fmt: skip


class _Measured(NamedTuple):
    rank: int
    error: TensorError

    @property
    def as_worst(self) -> str:
        """The error, the tensor and its single-device error."""
        error = self.error
        at = f"{error.name} on rank {self.rank}"
        if error.says:
            return f"{at}: {error.says}"
        if not math.isfinite(error.ratio):
            return f"worst not finite: {at} ({error.error:.2e} against {error.single:.2e} on one device)"
        ratio = f"{error.ratio:.2f}" if error.ratio < _LARGE else f"{error.ratio:.2g}"
        return f"worst {ratio}x: {at} ({error.error:.2e} against {error.single:.2e} on one device)"

    def multiple(self, size: int) -> str:
        """How many times the right one the tensor is, among `size` ranks; empty where it is no multiple."""
        if self.error.times is None:
            return ""
        return f"{self.error.name}: {multiple_text(self.error.times, size)} times the reference"


def _errors(config: JobConfig, facts: Facts, mode: AnyMode, id: CheckId, *, only: str) -> Check:
    """Worst error over ranks and tensors, as a multiple of the single-device error in the same dtype."""
    limit = config.gate.error_ratio
    errors = facts.map(lambda known: known.errors_in(mode, only)).where(bool)
    if not errors:
        return _not_made(mode, id, Status.FAIL, f"at most {limit:g}x", "not measured")
    in_order = [_Measured(rank, error) for rank, found in errors.items() for error in found]
    bad = [one for one in in_order if one.error.badness > limit]
    why_open = first(filter(None, map(_why_undecided, errors.values()))) if not bad else None
    if why_open is not None:
        check = _not_made(mode, id, Status.SKIPPED, f"at most {limit:g}x the single-device error", why_open)
        return check.changed(is_undecided=True)
    measured = sorted(in_order, key=lambda one: one.error.badness, reverse=True)
    details = [f"rank {one.rank} {one.error.name}: {one.error.says or f'{one.error.ratio:.2f}x'}" for one in bad[:8]]
    observed = measured[0].as_worst
    line = None
    if bad and only == "forward":
        wrong_in = facts.map(lambda known: known.first_wrong).where(bool)
        if wrong_in:
            details += [f"rank {rank}: first wrong in {module}" for rank, module in wrong_in.items()]
            observed += f", first wrong in {values_text(wrong_in)}"
        ops = {rank: known.first_wrong_op for rank, known in facts.items() if known.first_wrong_op}
        begins = earliest(ops)
        if begins:
            op, ranks = begins
            observed = f"{bad[0].multiple(op.size) or observed}; it begins with {op.brief}"
            details = [f"{named_ranks(ranks)}: {op.text}", *details]
            line = op.line
    left_out = first(known.left_out for known in facts.values() if known.left_out) if only == "forward" else None
    if left_out:
        details.append(f"not compared, as they are no rows of the reference's: {', '.join(left_out)}")
    unmeasured = facts.without(errors).ranks
    if unmeasured:
        observed += f"; not measured on {named_ranks(unmeasured)}"
    blamed = [*(one.rank for one in bad), *unmeasured]
    return make_check(
        mode, id, blamed, f"at most {limit:g}x the single-device error", observed, details=details, line=line
    )  # fmt: skip


def _why_undecided(errors: Sequence[TensorError]) -> str | None:
    by_name = {error.what.removeprefix("eager "): error for error in errors}
    names = undecided({name: error.is_judged for name, error in by_name.items()})
    if not names:
        return None
    worst = by_name[names[0]]
    also = f" (so are {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"cannot be judged: on one device {worst.name} is {worst.single:.2g} away from float64{also}, which is no "
        "rounding; does it draw random numbers inside of a kernel, or take its own? Compare it in eval mode"
    )


MODES: dict[str, Judge] = {"A": mode_a, "B": mode_b, "C": mode_c, TARGET: target}
