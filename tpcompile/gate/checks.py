"""Digests of all ranks -> the checks of modes A, B and C; torch-free, since a replay makes them again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpcompile.config import RunConfig
from tpcompile.evidence.checks import (
    agreement,
    any_compiled,
    kept,
    make_check,
    no_breaks,
    num_graphs,
    tp_aware,
    values_text,
)
from tpcompile.evidence.records import Check, CheckId, Divergence, RankDigest, Status
from tpcompile.evidence.splits import region_check
from tpcompile.evidence.text.ranks import ranks_text

FIRST, STEADY, RESIZED = "first", "steady", "resized"
Judge = Callable[[RunConfig, Sequence[RankDigest], Sequence[Divergence]], list[Check]]


def mode_a(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode A must show the cliff: every collective call site breaks the graph."""
    _ = config, divergences
    if not digests:
        return []
    sites: list[str] = digests[0].facts.get("A/sites", [])
    per_forward = int(digests[0].facts.get("A/collectives_per_forward", 0))
    if not per_forward:
        return [make_check("A", "the cliff", [], "collectives in the block", "none: tp is 1", status=Status.SKIPPED)]
    broken = _facts(digests, "A/broken_sites", [])
    regions = _facts(digests, "A/regions_per_forward", 0)
    bad_sites = [rank for rank, found in broken.items() if not set(sites).issubset(found)]
    bad_regions = [rank for rank, count in regions.items() if count <= per_forward]
    seen = f"all {len(sites)} among the break reasons"
    if bad_sites:
        seen = f"missing: {sorted(set(sites).difference(broken[bad_sites[0]]))}"
    return [
        any_compiled("A", digests),
        make_check(
            "A", "every collective call site breaks the graph", bad_sites,
            f"{len(sites)} sites: {', '.join(sites)}",
            seen,
        ),
        make_check(
            "A", "regions entered per forward exceed collectives", bad_regions,
            f"more than {per_forward}", values_text(regions),
        ),
    ]  # fmt: skip


def mode_b(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode B looks fine and is not: one graph, right forward, gradient times world size."""
    world = len(digests)
    found = [any_compiled("B", digests), *_one_graph("B", digests), *agreement("B", digests, divergences)]
    found += _errors(config, digests, "B", "forward right", only="forward")
    eager = _facts(digests, "B/trap_eager", None)
    compiled = _facts(digests, "B/trap_compiled", None)
    if world == 1:
        return [
            *found,
            make_check("B", "gradient trap detected", [], "tp > 1", "tp is 1", status=Status.SKIPPED),
        ]
    bad = [r for r in eager if (eager[r], compiled[r]) != (1.0, float(world))]
    found.append(
        make_check(
            "B", "gradient trap detected", bad,
            f"gradient factor 1 in eager, {world} compiled",
            f"{values_text(eager)} in eager, {values_text(compiled)} compiled",
        )
    )  # fmt: skip
    return found


def mode_c(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode C is the contract."""
    return [
        any_compiled("C", digests),
        *_one_graph("C", digests),
        region_check("C", digests, phases=[f"C/{name}" for name in (FIRST, STEADY, RESIZED)]),
        _steady(config, digests),
        *_resized(config, digests),
        *agreement("C", digests, divergences),
        _schedule(digests),
        *_errors(config, digests, "C", "forward right", only="forward"),
        *(_errors(config, digests, "C", "gradients right", only="grad") if config.train else []),
        *_errors(config, digests, "C", "eager equals compiled", only="eager"),
        tp_aware("C", digests),
        kept("C", digests),
    ]


def timings(digests: Sequence[RankDigest]) -> dict[str, float]:
    """Slowest rank's median ms per call, by mode."""
    keys = {key for d in digests for key in d.facts if key.endswith("/median_ms")}
    return {key.removesuffix("/median_ms"): max(d.facts.get(key, 0.0) for d in digests) for key in sorted(keys)}


def _facts(digests: Sequence[RankDigest], key: str, default: Any) -> dict[int, Any]:
    return {digest.rank: digest.facts.get(key, default) for digest in digests}


def _graphs(digests: Sequence[RankDigest], phase: str) -> dict[int, int]:
    return {digest.rank: num_graphs(digest, phase) for digest in digests}


def _reasons(digests: Sequence[RankDigest], phase: str) -> list[str]:
    """Why ranks recompiled in a phase."""
    found = [(digest.rank, *said) for digest in digests for said in digest.recompile_reasons]
    return [f"rank {rank}: {reason}" for rank, where, reason in found if where == phase]


def _one_graph(mode: str, digests: Sequence[RankDigest]) -> list[Check]:
    phase = f"{mode}/{FIRST}"
    graphs = _graphs(digests, phase)
    return [
        make_check(
            mode,
            "one graph",
            [r for r, n in graphs.items() if n != 1],
            "1 graph on every rank",
            values_text(graphs),
        ),
        no_breaks(mode, "", phase, digests, id=CheckId.UNBROKEN),
    ]


def _steady(config: RunConfig, digests: Sequence[RankDigest]) -> Check:
    phase = f"C/{STEADY}"
    frames = {d.rank: d.counters_of(phase).frames + num_graphs(d, phase) for d in digests}
    calls = {d.rank: d.counters_of(phase).calls for d in digests}
    bad = [r for r in frames if frames[r] or calls[r] != config.gate.steady_calls]
    return make_check(
        "C", "recompiles in steady calls", bad, f"0 compiles in {config.gate.steady_calls} calls",
        f"{values_text(frames, 'compile')} in {values_text(calls, 'call')}",
        details=_reasons(digests, phase),
    )  # fmt: skip


def _resized(config: RunConfig, digests: Sequence[RankDigest]) -> list[Check]:
    phase = f"C/{RESIZED}"
    graphs = _graphs(digests, phase)
    never = [d.rank for d in digests if not d.counters_of(phase).calls]
    usual = max(set(graphs.values()), key=list(graphs.values()).count) if graphs else 0
    odd = [rank for rank, number in graphs.items() if number > 1 or number != usual]
    bad = [*odd, *never]
    seq = f"{config.block.seq_len} to {config.resized_seq_len} tokens"
    return [
        make_check(
            "C", "one recompile at most when the length changes", bad, f"at most 1 compile, on all ranks ({seq})",
            f"{values_text(graphs, 'compile')}{'; never called on rank ' + ranks_text(never) if never else ''}",
            details=_reasons(digests, phase) if bad else [],
        ),
        no_breaks("C", "graph breaks after the change", phase, digests),
    ]  # fmt: skip


def _schedule(digests: Sequence[RankDigest]) -> Check:
    wrong: dict[int, str] = {}
    for digest in digests:
        declared, seen = digest.facts.get("C/declared", []), digest.facts.get("C/collectives", [])
        if declared != seen:
            wrong[digest.rank] = _first_difference(declared, seen)
    number = len(digests[0].facts.get("C/declared", [])) if digests else 0
    lines = [d.facts.get("C/collective_lines", []) for d in digests if d.rank in wrong]
    return make_check(
        "C", "collectives as declared by the block", list(wrong), f"{number} collectives, in order",
        next(iter(wrong.values()), f"the same {number}"),
        details=[f"compiled at {line}" for line in dict.fromkeys(lines[0])] if lines else [],
    )  # fmt: skip


def _first_difference(declared: Sequence[str], seen: Sequence[str]) -> str:
    for number, (want, got) in enumerate(zip(declared, seen, strict=False)):
        if want != got:
            return f"#{number} is {got}, declared {want}"
    if len(declared) > len(seen):
        return f"{len(seen)} of {len(declared)}; missing #{len(seen)} {declared[len(seen)]}"
    return f"{len(seen)} instead of {len(declared)}; extra #{len(declared)} {seen[len(declared)]}"


@dataclass(frozen=True)
class _Error:
    """The error of one tensor on one rank."""

    rank: int
    what: str
    error: float
    single: float
    """The single-device error."""
    ratio: float

    @property
    def badness(self) -> float:
        """The ratio; no number is worse than any."""
        return float("inf") if math.isnan(self.ratio) else self.ratio


def _errors(config: RunConfig, digests: Sequence[RankDigest], mode: str, name: str, *, only: str) -> list[Check]:
    """Worst error over ranks and tensors, as a multiple of the single-device error in the same dtype."""
    limit = config.gate.error_ratio
    measured = [error for digest in digests for error in _measured(digest, f"{mode}/error/", only)]
    if not measured:
        return [make_check(mode, name, [], f"at most {limit:g}x", "not measured", status=Status.FAIL)]
    worst = max(measured, key=lambda error: error.badness)
    bad = [error for error in measured if not error.ratio <= limit]  # NaN is bad too
    details = [f"rank {e.rank} {e.what}: {e.ratio:.2f}x" for e in sorted(bad, key=lambda e: -e.badness)[:8]]
    observed = (
        f"worst {worst.ratio:.2f}x: {worst.what} on rank {worst.rank} "
        f"({worst.error:.2e} against {worst.single:.2e} on one device)"
    )
    first_wrong = _first_wrong(mode, digests) if only == "forward" else {}
    if bad and first_wrong:
        details += [f"rank {rank}: first wrong in {module}" for rank, module in first_wrong.items()]
        observed += f", first wrong in {values_text(first_wrong)}"
    unmeasured = {digest.rank for digest in digests} - {error.rank for error in measured}
    if unmeasured:
        observed += f"; not measured on rank {ranks_text(tuple(unmeasured))}"
    expected = f"at most {limit:g}x the single-device error"
    return [make_check(mode, name, [*(e.rank for e in bad), *unmeasured], expected, observed, details=details)]


def _measured(digest: RankDigest, prefix: str, only: str) -> list[_Error]:
    facts = {key.removeprefix(prefix): fact for key, fact in digest.facts.items() if key.startswith(prefix + only)}
    return [_Error(digest.rank, what, **fact) for what, fact in facts.items()]


def _first_wrong(mode: str, digests: Sequence[RankDigest]) -> dict[int, str]:
    key = f"{mode}/first_wrong"
    return {digest.rank: digest.facts[key] for digest in digests if key in digest.facts}


MODES: dict[str, Judge] = {"A": mode_a, "B": mode_b, "C": mode_c}
