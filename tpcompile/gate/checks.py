"""Digests of all ranks -> the checks of modes A, B and C; torch-free, since a replay makes them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    missed = {d.rank: sorted(set(sites) - set(d.facts.get("A/broken_sites", []))) for d in digests}
    regions = {d.rank: int(d.facts.get("A/regions_per_forward", 0)) for d in digests}
    bad_sites = [rank for rank, sites_ in missed.items() if sites_]
    bad_regions = [rank for rank, count in regions.items() if count <= per_forward]
    if not per_forward:
        return [make_check("A", "the cliff", [], "collectives in the block", "none: tp is 1", status=Status.SKIPPED)]
    return [
        any_compiled("A", digests),
        make_check(
            "A", "every collective call site breaks the graph", bad_sites,
            f"{len(sites)} sites: {', '.join(sites)}",
            f"missing: {missed[bad_sites[0]]}" if bad_sites else f"all {len(sites)} among the break reasons",
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
    eager = {d.rank: d.facts.get("B/trap_eager") for d in digests}
    compiled = {d.rank: d.facts.get("B/trap_compiled") for d in digests}
    if world == 1:
        return [
            *found,
            make_check("B", "gradient trap detected", [], "tp > 1", "tp is 1", status=Status.SKIPPED),
        ]
    bad = [r for r in eager if eager[r] != 1.0 or compiled[r] != float(world)]
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


def _one_graph(mode: str, digests: Sequence[RankDigest]) -> list[Check]:
    phase = f"{mode}/{FIRST}"
    graphs = {d.rank: num_graphs(d, phase) for d in digests}
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
        details=[f"rank {d.rank}: {r}" for d in digests for p, r in d.recompile_reasons if p == phase],
    )  # fmt: skip


def _resized(config: RunConfig, digests: Sequence[RankDigest]) -> list[Check]:
    phase = f"C/{RESIZED}"
    graphs = {d.rank: num_graphs(d, phase) for d in digests}
    usual = max(set(graphs.values()), key=list(graphs.values()).count) if graphs else 0
    never = [d.rank for d in digests if not d.counters_of(phase).calls]
    bad = [r for r, n in graphs.items() if n > 1 or n != usual or r in never]
    seq = f"{config.block.seq_len} to {config.resized_seq_len} tokens"
    return [
        make_check(
            "C", "one recompile at most when the length changes", bad, f"at most 1 compile, on all ranks ({seq})",
            f"{values_text(graphs, 'compile')}{'; never called on rank ' + ranks_text(never) if never else ''}",
            details=[f"rank {d.rank}: {r}" for d in digests for p, r in d.recompile_reasons if p == phase and bad],
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


def _errors(config: RunConfig, digests: Sequence[RankDigest], mode: str, name: str, *, only: str) -> list[Check]:
    """Worst error over ranks and tensors, as a multiple of the single-device error in the same dtype."""
    limit = config.gate.error_ratio
    prefix = f"{mode}/error/{only}"
    measured: dict[int, dict[str, Any]] = {
        d.rank: {k.removeprefix(f"{mode}/error/"): v for k, v in d.facts.items() if k.startswith(prefix)}
        for d in digests
    }
    ratios = {(rank, what): v["ratio"] for rank, by in measured.items() for what, v in by.items()}
    if not ratios:
        return [make_check(mode, name, [], f"at most {limit:g}x", "not measured", status=Status.FAIL)]
    worst = max(ratios, key=lambda key: ratios[key] if ratios[key] == ratios[key] else float("inf"))
    bad = {key for key, ratio in ratios.items() if not ratio <= limit}
    value = measured[worst[0]][worst[1]]
    observed = (
        f"worst {ratios[worst]:.2f}x: {worst[1]} on rank {worst[0]} "
        f"({value['error']:.2e} against {value['single']:.2e} on one device)"
    )
    details = [f"rank {r} {w}: {ratios[r, w]:.2f}x" for r, w in sorted(bad, key=lambda k: -ratios[k])[:8]]
    if bad and only == "forward":
        first_wrong = {d.rank: d.facts[key] for d in digests if (key := f"{mode}/first_wrong") in d.facts}
        details += [f"rank {rank}: first wrong in {name}" for rank, name in first_wrong.items()]
        observed += f", first wrong in {values_text(first_wrong)}" if first_wrong else ""
    unmeasured = [rank for rank, by in measured.items() if not by]
    observed += f"; not measured on rank {ranks_text(unmeasured)}" if unmeasured else ""
    expected = f"at most {limit:g}x the single-device error"
    return [make_check(mode, name, [*(r for r, _ in bad), *unmeasured], expected, observed, details=details)]


MODES: dict[str, Judge] = {"A": mode_a, "B": mode_b, "C": mode_c}
