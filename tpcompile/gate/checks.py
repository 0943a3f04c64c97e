"""Digests of all ranks -> the checks of modes A, B and C; torch-free, since a replay makes them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpcompile.config import Mode, RunConfig
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
from tpcompile.gate.facts import GateFacts, Trap

FIRST, STEADY, RESIZED = "first", "steady", "resized"
Judge = Callable[[RunConfig, Sequence[RankDigest], Sequence[Divergence]], list[Check]]


def mode_a(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode A must show the cliff: every collective call site breaks the graph."""
    _ = config, divergences
    if not digests:
        return []
    cliffs = {rank: facts.cliff for rank, facts in _facts(digests).items()}
    sites, per_forward = cliffs[digests[0].rank].sites, cliffs[digests[0].rank].collectives_per_forward
    if not per_forward:
        return [make_check("A", "the cliff", [], "collectives in the block", "none: tp is 1", status=Status.SKIPPED)]
    unbroken = {rank: sorted(set(sites).difference(cliff.broken_sites)) for rank, cliff in cliffs.items()}
    bad_sites = [rank for rank, missing in unbroken.items() if missing]
    regions = {rank: cliff.regions_per_forward for rank, cliff in cliffs.items()}
    bad_regions = [rank for rank, count in regions.items() if count <= per_forward]
    seen = f"missing: {unbroken[bad_sites[0]]}" if bad_sites else f"all {len(sites)} among the break reasons"
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
    traps = {rank: facts.trap for rank, facts in _facts(digests).items()}
    if world == 1:
        return [
            *found,
            make_check("B", "gradient trap detected", [], "tp > 1", "tp is 1", status=Status.SKIPPED),
        ]
    eager = values_text({rank: trap.eager for rank, trap in traps.items()})
    compiled = values_text({rank: trap.compiled for rank, trap in traps.items()})
    expected = Trap(eager=1.0, compiled=float(world))
    found.append(
        make_check(
            "B", "gradient trap detected", [rank for rank, trap in traps.items() if trap != expected],
            f"gradient factor 1 in eager, {world} compiled", f"{eager} in eager, {compiled} compiled",
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
    slowest: dict[str, float] = {}
    for facts in _facts(digests).values():
        for mode, median_ms in facts.median_ms.items():
            slowest[mode] = max(median_ms, slowest.get(mode, 0.0))
    return dict(sorted(slowest.items()))


def _facts(digests: Sequence[RankDigest]) -> dict[int, GateFacts]:
    return {digest.rank: GateFacts.model_validate(digest.facts) for digest in digests}


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
    schedules = {rank: facts.schedule for rank, facts in _facts(digests).items()}
    wrong = {rank: found for rank, found in schedules.items() if found.declared != found.compiled}
    number = len(schedules[digests[0].rank].declared) if digests else 0
    observed, details = f"the same {number}", []
    for found in list(wrong.values())[:1]:
        observed = _first_difference(found.declared, found.compiled)
        details = [f"compiled at {line}" for line in dict.fromkeys(found.lines)]
    expected = f"{number} collectives, in order"
    return make_check(
        "C", "collectives as declared by the block", list(wrong), expected, observed, details=details
    )  # fmt: skip


def _first_difference(declared: Sequence[str], seen: Sequence[str]) -> str:
    for number, (want, got) in enumerate(zip(declared, seen, strict=False)):
        if want != got:
            return f"#{number} is {got}, declared {want}"
    if len(declared) > len(seen):
        return f"{len(seen)} of {len(declared)}; missing #{len(seen)} {declared[len(seen)]}"
    return f"{len(seen)} instead of {len(declared)}; extra #{len(declared)} {seen[len(declared)]}"


def _errors(config: RunConfig, digests: Sequence[RankDigest], mode: Mode, name: str, *, only: str) -> list[Check]:
    """Worst error over ranks and tensors, as a multiple of the single-device error in the same dtype."""
    limit = config.gate.error_ratio
    facts = _facts(digests)
    measured = [
        (rank, error) for rank, known in facts.items() for error in known.errors_in(mode) if error.what.startswith(only)
    ]
    if not measured:
        return [make_check(mode, name, [], f"at most {limit:g}x", "not measured", status=Status.FAIL)]
    worst_first = sorted(measured, key=lambda found: -found[1].badness)
    bad = [(rank, error) for rank, error in worst_first if not error.badness <= limit]
    rank, worst = worst_first[0]
    observed = (
        f"worst {worst.ratio:.2f}x: {worst.what} on rank {rank} "
        f"({worst.error:.2e} against {worst.single:.2e} on one device)"
    )
    details = [f"rank {rank} {error.what}: {error.ratio:.2f}x" for rank, error in bad[:8]]
    first_wrong = {rank: known.first_wrong for rank, known in facts.items() if known.first_wrong}
    if bad and first_wrong and only == "forward":
        details += [f"rank {rank}: first wrong in {module}" for rank, module in first_wrong.items()]
        observed += f", first wrong in {values_text(first_wrong)}"
    unmeasured = set(facts).difference(rank for rank, _ in measured)
    if unmeasured:
        observed += f"; not measured on rank {ranks_text(tuple(unmeasured))}"
    blamed = [*(rank for rank, _ in bad), *unmeasured]
    return [make_check(mode, name, blamed, f"at most {limit:g}x the single-device error", observed, details=details)]


MODES: dict[str, Judge] = {"A": mode_a, "B": mode_b, "C": mode_c}
