"""Digests of all ranks -> the named checks of modes A, B and C, each with expected and observed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tpcompile.config import RunConfig
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import Check, Divergence, Layer, PhaseCounters, RankDigest, Status, UserLine
from tpcompile.evidence.splits import region_check

COMPILED = "something was compiled"
TIMED_OUT = "finished in time"
ALIVE = "every rank stayed alive"
AGREED = "collectives agreed before they ran"
NO_ERROR = "no rank raised"
ARRIVED = "every rank arrived"
REPORTED = "every rank reported"
UNBROKEN = "no graph breaks"
TOGETHER = "every rank compiles together"
MOVING = "no rank is stuck"
LIVE_ONLY = frozenset({TIMED_OUT, ALIVE, AGREED, NO_ERROR, ARRIVED, TOGETHER, MOVING})
"""Checks that only the live run can make; a replay keeps their outcome."""
CAUSES = LIVE_ONLY - {TOGETHER} | {REPORTED, UNBROKEN, COMPILED}
"""Checks whose failure explains a divergence, not the other way round."""

AGREE = "equal on all ranks"
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
        return [_check("A", "the cliff", [], "collectives in the block", "none: tp is 1", status=Status.SKIPPED)]
    return [
        _compiled("A", digests),
        _check(
            "A", "every collective call site breaks the graph", bad_sites,
            f"{len(sites)} sites: {', '.join(sites)}",
            f"missing: {missed[bad_sites[0]]}" if bad_sites else f"all {len(sites)} among the break reasons",
        ),
        _check(
            "A", "regions entered per forward exceed collectives", bad_regions,
            f"more than {per_forward}", _values(regions),
        ),
    ]  # fmt: skip


def mode_b(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode B looks fine and is not: one graph, right forward, gradient times world size."""
    world = len(digests)
    found = [_compiled("B", digests), *_one_graph("B", digests), *_agreement("B", digests, divergences)]
    found += _errors(config, digests, "B", "forward right", only="forward")
    eager = {d.rank: d.facts.get("B/trap_eager") for d in digests}
    compiled = {d.rank: d.facts.get("B/trap_compiled") for d in digests}
    if world == 1:
        return [*found, _check("B", "gradient trap detected", [], "tp > 1", "tp is 1", status=Status.SKIPPED)]
    bad = [r for r in eager if eager[r] != 1.0 or compiled[r] != float(world)]
    found.append(
        _check(
            "B", "gradient trap detected", bad,
            f"gradient factor 1 in eager, {world} compiled", f"{_values(eager)} in eager, {_values(compiled)} compiled",
        )
    )  # fmt: skip
    return found


def mode_c(config: RunConfig, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Mode C is the contract."""
    return [
        _compiled("C", digests),
        *_one_graph("C", digests),
        region_check("C", digests, phases=[f"C/{name}" for name in (FIRST, STEADY, RESIZED)]),
        _steady(config, digests),
        *_resized(config, digests),
        *_agreement("C", digests, divergences),
        _schedule(digests),
        *_errors(config, digests, "C", "forward right", only="forward"),
        *(_errors(config, digests, "C", "gradients right", only="grad") if config.train else []),
        *_errors(config, digests, "C", "eager equals compiled", only="eager"),
        _tp_aware("C", digests),
        _kept("C", digests),
    ]


def captured(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """Any program of the user: it may be several graphs, but unbroken and the same on all ranks."""
    phases = dict.fromkeys(c.phase for d in digests for c in d.counters)
    broken = [_no_breaks("", f"{UNBROKEN} in {phase}", phase, digests, frames=False) for phase in phases]
    agreement = _agreement("", digests, divergences)
    return [
        _compiled("", digests),
        *broken,
        region_check("", digests, phases=phases),
        *agreement,
        _tp_aware("", digests),
        _kept("", digests),
    ]


def agreed(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
    """A program in mid-run: what the ranks compiled so far is the same."""
    return _agreement("", digests, divergences)


def ended_early(judged: Sequence[Check]) -> list[Check]:
    """Checks of a run that was stopped: what never happened is skipped, what was seen to be wrong stays red."""
    seen = [c for c in judged if c.name == UNBROKEN or c.name.endswith(AGREE)]
    return [
        c if c in seen or c.status != Status.FAIL else c.model_copy(update={"status": Status.SKIPPED, "ranks": ()})
        for c in judged
    ]


MODES: dict[str, Judge] = {"A": mode_a, "B": mode_b, "C": mode_c}


def timings(digests: Sequence[RankDigest]) -> dict[str, float]:
    """Slowest rank's median ms per call, by mode."""
    keys = {key for d in digests for key in d.facts if key.endswith("/median_ms")}
    return {key.removesuffix("/median_ms"): max(d.facts.get(key, 0.0) for d in digests) for key in sorted(keys)}


def _compiled(mode: str, digests: Sequence[RankDigest]) -> Check:
    graphs = {d.rank: sum(_graphs(d, phase) for phase in _phases(d, mode)) for d in digests}
    none = [rank for rank, count in graphs.items() if count == 0]
    # Some ranks only: the ranks disagree, which is another failure than "nothing compiled".
    name = COMPILED if len(none) == len(digests) else "every rank compiled"
    return _check(mode, name, none, "at least 1 graph on every rank", _values(graphs, "graph"))


def _one_graph(mode: str, digests: Sequence[RankDigest]) -> list[Check]:
    phase = f"{mode}/{FIRST}"
    graphs = {d.rank: _graphs(d, phase) for d in digests}
    return [
        _check(mode, "one graph", [r for r, n in graphs.items() if n != 1], "1 graph on every rank", _values(graphs)),
        _no_breaks(mode, UNBROKEN, phase, digests),
    ]


def _no_breaks(mode: str, name: str, phase: str, digests: Sequence[RankDigest], *, frames: bool = True) -> Check:
    """Counter, frames and trace events all say so: any one alone misses leading or trailing breaks."""
    evidence = {d.rank: _break_evidence(d, phase, frames=frames) for d in digests}
    bad = [rank for rank, text in evidence.items() if text]
    events = [b for d in digests for p, b in d.breaks if p == phase]
    first = next((b for b in events if b.line), events[0] if events else None)
    return _check(
        mode, name, bad, "0 breaks on every rank", evidence[bad[0]] if bad else "0",
        details=[f"{b.line}: {b.reason}" for b in dict.fromkeys(events)], line=first.line if first else None,
    )  # fmt: skip


def _break_evidence(digest: RankDigest, phase: str, *, frames: bool) -> str:
    counters = _counters(digest, phase)
    events = [b for p, b in digest.breaks if p == phase]
    said = []
    if counters.breaks:
        said.append(f"break counter {counters.breaks}")
    if events:
        said.append(f"break events {len(events)}")
    if frames and counters.frames > max(1, counters.graphs):
        said.append(f"frames {counters.frames} for graphs {counters.graphs}")
    return ", ".join(said)


def _steady(config: RunConfig, digests: Sequence[RankDigest]) -> Check:
    phase = f"C/{STEADY}"
    frames = {d.rank: _counters(d, phase).frames + _graphs(d, phase) for d in digests}
    calls = {d.rank: _counters(d, phase).calls for d in digests}
    bad = [r for r in frames if frames[r] or calls[r] != config.gate.steady_calls]
    return _check(
        "C", "no recompile in steady calls", bad, f"0 compiles in {config.gate.steady_calls} calls",
        f"{_values(frames, 'compile')} in {_values(calls, 'call')}",
        details=[f"rank {d.rank}: {r}" for d in digests for p, r in d.recompile_reasons if p == phase],
    )  # fmt: skip


def _resized(config: RunConfig, digests: Sequence[RankDigest]) -> list[Check]:
    phase = f"C/{RESIZED}"
    graphs = {d.rank: _graphs(d, phase) for d in digests}
    usual = max(set(graphs.values()), key=list(graphs.values()).count) if graphs else 0
    never = [d.rank for d in digests if not _counters(d, phase).calls]
    bad = [r for r, n in graphs.items() if n > 1 or n != usual or r in never]
    seq = f"{config.block.seq_len} to {config.resized_seq_len} tokens"
    return [
        _check(
            "C", "one recompile at most when the length changes", bad, f"at most 1 compile, on all ranks ({seq})",
            f"{_values(graphs, 'compile')}{'; never called on rank ' + ranks_text(never) if never else ''}",
            details=[f"rank {d.rank}: {r}" for d in digests for p, r in d.recompile_reasons if p == phase and bad],
        ),
        _no_breaks("C", "no graph breaks after the change", phase, digests),
    ]  # fmt: skip


def _agreement(mode: str, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
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
            _check(
                mode, f"{layer} {AGREE}", [], "equal", observed,
                status=Status.FAIL if blamed else Status.PASS if seen else Status.SKIPPED,
                details=[d.title for d in (*red[1:], *noted)],
                line=first.line if first else None,
                ranks=blamed.groups[-1].ranks if blamed else (),
            ).model_copy(update={"cause": blamed.cause if blamed else Cause.UNKNOWN})
        )  # fmt: skip
    return found


def _of_mode(divergence: Divergence, mode: str) -> bool:
    return not mode or not divergence.where or divergence.where.startswith(f"{mode}/")


def _schedule(digests: Sequence[RankDigest]) -> Check:
    wrong: dict[int, str] = {}
    for digest in digests:
        declared, seen = digest.facts.get("C/declared", []), digest.facts.get("C/collectives", [])
        if declared != seen:
            wrong[digest.rank] = _first_difference(declared, seen)
    number = len(digests[0].facts.get("C/declared", [])) if digests else 0
    lines = [d.facts.get("C/collective_lines", []) for d in digests if d.rank in wrong]
    return _check(
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
        return [_check(mode, name, [], f"at most {limit:g}x", "not measured", status=Status.FAIL)]
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
        observed += f", first wrong in {_values(first_wrong)}" if first_wrong else ""
    unmeasured = [rank for rank, by in measured.items() if not by]
    observed += f"; not measured on rank {ranks_text(unmeasured)}" if unmeasured else ""
    expected = f"at most {limit:g}x the single-device error"
    return [_check(mode, name, [*(r for r, _ in bad), *unmeasured], expected, observed, details=details)]


def _tp_aware(mode: str, digests: Sequence[RankDigest]) -> Check:
    found = {item.about: item for d in digests for item in d.undeclared_ops}
    first = next(iter(found.values()), None)
    return _check(
        mode, "no undeclared custom op or Triton kernel", [d.rank for d in digests if d.undeclared_ops],
        "only ops declared TP-aware",
        ", ".join(found) if found else "none",
        details=["declare it with gate.tp_aware_ops once its maths is right on a shard"] if found else [],
        line=first.line if first else None,
    )  # fmt: skip


def _kept(mode: str, digests: Sequence[RankDigest]) -> Check:
    found = {item.about: item for d in digests for item in d.overwritten}
    first = next(iter(found.values()), None)
    is_seen = any(layer.layer == Layer.KERNELS for d in digests for c in d.compiles for layer in c.layers)
    return _check(
        mode, "no reduce overwrites what is read later", [d.rank for d in digests if d.overwritten],
        "reduced buffers share no memory with live tensors",
        f"{', '.join(found)} reduces a concatenation in place whose parts are read afterwards"
        if found else "none does" if is_seen else "not observed",
        status=None if is_seen else Status.SKIPPED,
        details=["an Inductor bug: repro/inductor_all_reduce_of_cat.py says what helps"] if found else [],
        line=first.line if first else None,
    )  # fmt: skip


def _phases(digest: RankDigest, mode: str) -> list[str]:
    return [c.phase for c in digest.counters if not mode or c.phase.startswith(f"{mode}/")]


def _counters(digest: RankDigest, phase: str) -> PhaseCounters:
    return next((c for c in digest.counters if c.phase == phase), PhaseCounters(phase=phase))


def _graphs(digest: RankDigest, phase: str) -> int:
    """Graphs of a phase, the larger of Dynamo's counter and of the graphs in the trace."""
    traced = sum(c.phase == phase and any(x.layer == Layer.COLLECTIVES for x in c.layers) for c in digest.compiles)
    return max(_counters(digest, phase).graphs, traced)


def _values(values: dict[int, Any], unit: str = "") -> str:
    """`{0: 1, 1: 1, 2: 3}` -> `1 (ranks 0-1), 3 (rank 2)`; one value for all ranks is just the value."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        groups.setdefault(f"{text} {unit}{'' if not unit or value == 1 else 's'}".strip(), []).append(rank)
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"{value} (rank {ranks_text(ranks)})" for value, ranks in groups.items())


def _check(
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
