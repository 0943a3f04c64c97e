"""Evidence of a run -> what its page shows: every table is bounded, and says what was left out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from tpcompile.evidence.groups.align import Slot, align
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.judgement.equal_ranks import equal_ranks
from tpcompile.evidence.judgement.leading import cause_text, lead_ranks_text
from tpcompile.evidence.records import Divergence, Item, Layer, Lead, RankDigest, UserLine, Verdict
from tpcompile.evidence.shortened import shortened
from tpcompile.evidence.text.ranks import named_ranks, ranks_text
from tpcompile.evidence.timeline.conclude import led_to_text, side_text, usual_text
from tpcompile.report.page.evidence import Evidence, FusedGraph, Launch, Manifest, since_first
from tpcompile.report.page.excerpt import excerpt
from tpcompile.report.page.listing import Listing, listing
from tpcompile.report.page.shown import (
    Difference,
    Fusion,
    GridLayer,
    Guards,
    Lane,
    LaunchRow,
    Parting,
    Side,
    Value,
    Values,
    View,
)
from tpcompile.report.wording import (
    about_lines,
    accepted_lines,
    by_mode,
    do_first_label,
    guard_line,
    headline,
    item_text,
    mode_title,
    more_alike,
    outcome,
    plain,
    red_by_kind,
)

MAX_DIFFERENCES, MAX_ACCEPTED = 20, 20
MAX_SIDES = 8
"""Groups of ranks of one difference."""
MAX_GUARDS = 3_000
"""Rows of guards over all compiles."""
MAX_LANES = 64
"""Rows of the timeline; ranks that did the same share one."""
MAX_EVENTS = 2_000
"""Events of one row."""
MAX_LINKS = 64
"""Ranks whose pages of tlparse are linked; those have an index of all."""
MAX_LAUNCHES, MAX_REASONS = 400, 100
"""Launches, and reasons why nodes were not fused, of one graph."""
_MAX_CHARS = 300


def view_of(evidence: Evidence) -> View:
    """What the page of a run shows."""
    verdict = evidence.verdict
    slots = list(_slots(evidence.digests))
    kinds = red_by_kind(verdict)
    guards, num_guards_left_out = _guards(evidence, slots)
    lanes, notes = _lanes(evidence)
    return View(
        outcome=outcome(verdict),
        is_green=verdict.exit_code == 0,
        headline=headline(verdict),
        command=evidence.command,
        name=evidence.name,
        summary=plain(verdict.summary),
        facts=tuple((name, plain(text)) for name, text in evidence.facts.items()),
        parting=_parting(verdict.lead, guard_line(verdict)) if verdict.lead else None,
        differences=tuple(_difference(alike, evidence, slots) for alike in kinds[:MAX_DIFFERENCES]),
        num_differences=len(kinds),
        accepted=tuple(_accepted(verdict)),
        checks=tuple((mode_title(mode), tuple(checks)) for mode, checks in by_mode(verdict).items()),
        equal=tuple(plain(text) for text, _ in equal_ranks(verdict)),
        world_size=verdict.world_size,
        grid=tuple(_grid(evidence, slots)),
        lanes=lanes,
        has_clock=evidence.has_clock,
        guards=guards,
        num_guards_left_out=num_guards_left_out,
        fusion=tuple(_fusion(evidence)),
        timings=tuple((mode, f"{ms:.3g} ms") for mode, ms in sorted(verdict.timings_ms.items())),
        environment=tuple(_environment(evidence)),
        links=tuple((f"rank {rank}", address) for rank, address in sorted(evidence.tlparse.items())[:MAX_LINKS]),
        notes=tuple(map(plain, (*evidence.notes, *notes))),
    )


def _parting(lead: Lead, guard: str) -> Parting:
    parted = lead.parted
    sides = parted.sides if parted else ()
    usual = usual_text(parted) if parted else ""
    return Parting(
        cause=lead.cause.value if lead.consequence else plain(cause_text(lead)),
        ranks=lead_ranks_text(lead),
        guard=guard,
        source=excerpt(lead.seen_at or lead.line),
        parted_at=excerpt(lead.line) if lead.seen_at else None,
        sides=tuple(
            Side(
                named_ranks(side.ranks),
                plain(f"{side_text(side)}{usual}"),
                excerpt(side.line) if side.line != lead.line else None,  # it stands above both
            )
            for side in sides
        ),
        led_to=plain(led_to_text(parted).removeprefix("; ")) if parted and parted.led_to else "",
        consequence=plain(lead.consequence),
        do_first_label=plain(do_first_label(lead)),
        do_first=plain(lead.do_first),
    )


def _difference(alike: Sequence[Divergence], evidence: Evidence, slots: Sequence[Slot]) -> Difference:
    found = alike[0]
    lines = {group.line for group in found.groups}
    common = next(iter(lines)) if len(lines) == 1 else None
    sides = [
        Side(named_ranks(group.ranks), item_text(group.item), None if common else excerpt(group.line))
        for group in found.groups[:MAX_SIDES]
    ]
    return Difference(
        title=plain(found.title),
        facts=tuple(about_lines(found)),
        sides=tuple(sides),
        source=excerpt(common),
        listing=_listing(found, evidence, slots),
        links=tuple(_links(found, evidence, slots)),
        advice=plain(found.advice),
        more="; ".join(map(plain, more_alike(alike))),
    )


def _listing(found: Divergence, evidence: Evidence, slots: Sequence[Slot]) -> Listing | None:
    """The layer of the compile on a rank of the first group, and on one of the last."""
    if len(found.groups) < 2:
        return None
    left, right = found.groups[0].ranks[0], found.groups[-1].ranks[0]
    titles = (named_ranks(found.groups[0].ranks), named_ranks(found.groups[-1].ranks))
    if not {left, right} <= {digest.rank for digest in evidence.digests}:
        return None
    if not found.where:
        environments = (evidence.fetch(left, -1, found.layer, ""), evidence.fetch(right, -1, found.layer, ""))
        return listing(*environments, titles) if found.layer == Layer.ENVIRONMENT else None
    for slot in _slots_of(found, slots):
        if not {left, right} <= slot.taken.keys():
            continue
        parts = [part for layer, part in slot.differing if layer == found.layer]
        for part in parts:
            one = evidence.fetch(left, slot.taken[left].index, found.layer, part)
            two = evidence.fetch(right, slot.taken[right].index, found.layer, part)
            shown = listing(one, two, titles)
            if shown is not None:
                return shown
    return None


def _slots_of(found: Divergence, slots: Sequence[Slot]) -> Iterator[Slot]:
    for slot in slots:
        if found.where == slot.where or found.where.startswith(f"{slot.where} ("):  # with the part of a layer
            yield slot


def _links(found: Divergence, evidence: Evidence, slots: Sequence[Slot]) -> Iterator[tuple[str, str]]:
    """tlparse's page of the compile, of one rank of each side."""
    for group in found.groups[:MAX_SIDES]:
        rank = group.ranks[0]
        slot = first(slot for slot in _slots_of(found, slots) if rank in slot.taken)
        if slot is not None and rank in evidence.tlparse:
            compile_id = slot.taken[rank].compile_id
            yield f"rank {rank}, {compile_id}", f"{evidence.tlparse[rank]}#[{compile_id}]"


def _accepted(verdict: Verdict) -> Iterator[str]:
    listed = accepted_lines(verdict)
    yield from map(plain, listed[:MAX_ACCEPTED])
    if len(listed) > MAX_ACCEPTED:
        yield f"and {len(listed) - MAX_ACCEPTED} more in verdict.json"


# Compiles of all ranks, beside each other.


def _slots(digests: Sequence[RankDigest]) -> Iterator[Slot]:
    """The compiles that correspond, by domain; of ranks with equal digests one stands for all."""
    for of_domain in grouped(digests, lambda digest: digest.domain).values():
        alike = grouped(
            of_domain,
            lambda digest: tuple((c.compile_id, c.phase, c.frame, c.step, *c.shas.items()) for c in digest.compiles),
        )
        ranks_like = {ranks[0].rank: [digest.rank for digest in ranks] for ranks in alike.values()}
        for slot in align([ranks[0] for ranks in alike.values()]):
            taken = {rank: compile_ for one, compile_ in slot.taken.items() for rank in ranks_like[one]}
            yield Slot(slot.phase, slot.frame, taken)


def _grid(evidence: Evidence, slots: Sequence[Slot]) -> Iterator[GridLayer]:
    """For each layer which ranks have equal content; over all of it first."""
    size = evidence.verdict.world_size
    apart = dict[int, int]()
    for groups in evidence.verdict.domains.values():
        largest_first = sorted(groups, key=lambda ranks: (-len(ranks), ranks))
        apart |= {rank: number for number, ranks in enumerate(largest_first) for rank in ranks}
    yield _grid_layer("verdict", apart, size)
    environments = _numbered({digest.rank: digest.environment for digest in evidence.digests})
    if environments:
        yield _grid_layer(Layer.ENVIRONMENT.value, environments, size)
    for layer in Layer:
        shas: dict[int, list[object]] = {}
        for number, slot in enumerate(slots):
            for rank, compile_ in slot.taken.items():
                observed = [(number, one.part, one.sha256) for one in compile_.layers if one.layer == layer]
                if observed:
                    shas.setdefault(rank, []).append(tuple(observed))
        if shas:
            yield _grid_layer(layer.value, _of_domains(evidence, shas), size)


def _of_domains(evidence: Evidence, shas: dict[int, list[object]]) -> dict[int, int]:
    """Numbers of content, counted apart in each domain: ranks of different domains may differ."""
    found: dict[int, int] = {}
    for digests in grouped(evidence.digests, lambda digest: digest.domain).values():
        found |= _numbered({one.rank: tuple(shas[one.rank]) for one in digests if one.rank in shas})
    return found


def _numbered(content: Mapping[int, Hashable]) -> dict[int, int]:
    """Rank -> number of its group of equal ranks, the largest group first."""
    groups = ByRank(dict(content)).groups() if content else ()
    return {rank: number for number, ranks in enumerate(groups) for rank in ranks}


def _grid_layer(name: str, number_of: dict[int, int], size: int) -> GridLayer:
    codes = tuple(number_of.get(rank, -1) for rank in range(size))
    groups = grouped(range(size), lambda rank: codes[rank])
    texts = tuple(ranks_text(groups[number]) for number in sorted(groups) if number >= 0)
    return GridLayer(name, codes, texts)


def _guards(evidence: Evidence, slots: Sequence[Slot]) -> tuple[tuple[Guards, ...], int]:
    """Guards of every compile with the values of the ranks, compiles in which they differ first."""
    split = [(slot, slot.groups(Layer.GUARDS)) for slot in slots]
    with_guards = sorted((one for one in split if one[1]), key=lambda one: len(one[1]) == 1)
    found: list[Guards] = []
    left, left_out = MAX_GUARDS, 0
    for slot, groups in with_guards:
        if left <= 0:
            left_out += slot.taken[groups[0][0]].num_items(Layer.GUARDS)
            continue
        items = {ranks: evidence.fetch(ranks[0], slot.taken[ranks[0]].index, Layer.GUARDS, "") for ranks in groups[:16]}
        rows = sorted(_values(items), key=lambda row: not row.differs)
        found.append(Guards(slot.where, tuple(rows[:left])))
        left_out += max(0, len(rows) - left)
        left -= len(rows)
    return tuple(found), left_out


def _values(items: dict[tuple[int, ...], Sequence[Item]]) -> Iterator[Values]:
    """Items of groups of ranks, by what they are about."""
    tables = {ranks: grouped(found, lambda item: item.about) for ranks, found in items.items()}
    for about in dict.fromkeys(name for table in tables.values() for name in table):
        said: dict[str, list[int]] = {}
        line: UserLine | None = None
        for ranks, table in tables.items():
            here = table.get(about, [])
            line = line or next((item.line for item in here if item.line), None)
            text = "; ".join(item.says for item in here) if here else "(nothing)"
            said.setdefault(_short(text), []).extend(ranks)
        values = tuple(Value(ranks_text(sorted(ranks)), text) for text, ranks in said.items())
        yield Values(_short(about), values, _place(line))


def _environment(evidence: Evidence) -> Iterator[Values]:
    if not evidence.digests:
        return
    groups = ByRank({digest.rank: digest.environment for digest in evidence.digests}).groups()
    items = {ranks: evidence.fetch(ranks[0], -1, Layer.ENVIRONMENT, "") for ranks in groups[:16]}
    yield from sorted(_values(items), key=lambda row: not row.differs)


# What each rank did.


def _lanes(evidence: Evidence) -> tuple[tuple[Lane, ...], list[str]]:
    """Rows of the timeline: ranks that did the same share one, with the times of the first of them."""
    lead = evidence.verdict.lead
    odd = set(lead.ranks) if lead is not None and lead.is_rank_known else set[int]()
    did = since_first(evidence.events)
    alike = grouped(did, lambda rank: (rank in odd, *((event.kind, event.label) for event in did[rank])))
    groups = sorted(alike.values(), key=lambda ranks: (not odd.issuperset(ranks), ranks[0]))
    notes = []
    if evidence.has_clock and any(len(ranks) > 1 for ranks in groups):
        notes.append("timeline: ranks that did the same share a row, which shows the times of the first of them")
    if len(groups) > MAX_LANES:
        left_out = [rank for ranks in groups[MAX_LANES:] for rank in ranks]
        notes.append(f"timeline: {named_ranks(sorted(left_out))} are left out")
    lanes = []
    for ranks in groups[:MAX_LANES]:
        events = did[ranks[0]]
        lane = Lane(ranks_text(ranks), odd.issuperset(ranks), tuple(events[:MAX_EVENTS]), len(events[MAX_EVENTS:]))
        lanes.append(lane)
    return tuple(lanes), notes


# Kernels.


def _fusion(evidence: Evidence) -> Iterator[Fusion]:
    alike = grouped(evidence.manifests, lambda rank: id(evidence.manifests[rank]))  # equal files are one object
    for ranks in alike.values():
        manifest = evidence.manifests[ranks[0]]
        for graph in manifest.graphs:
            yield _fused(graph, manifest, ranks)


def _fused(graph: FusedGraph, manifest: Manifest, ranks: Sequence[int]) -> Fusion:
    launches = [_launch(one) for one in graph.launches if one.role != "wait"]
    missed: dict[str, list[str]] = {}
    for pair in graph.decisions.pairs if graph.decisions else ():
        for reason in pair.refused:
            missed.setdefault(_short(reason), []).append(f"{pair.first} + {pair.second}")
    reasons = sorted(missed.items(), key=lambda one: -len(one[1]))
    return Fusion(
        title=plain(f"compile {graph.compile_id}, {graph.phase}, on {named_ranks(ranks)} ({manifest.device})"),
        launches=tuple(launches[:MAX_LAUNCHES]),
        num_launches=len(launches),
        num_bytes=sum(one.num_bytes for one in launches),
        missed=tuple(Value(_short(", ".join(pairs)), text) for text, pairs in reasons[:MAX_REASONS]),
    )


def _launch(launch: Launch) -> LaunchRow:
    num_bytes = sum(launch.reads.values()) + sum(launch.writes.values())
    line = launch.lines[0] if launch.lines else None
    return LaunchRow(_short(launch.name), launch.role, _short(", ".join(launch.ops)), num_bytes, _place(line))


def _place(line: UserLine | None) -> str:
    return plain(str(line)) if line else ""


def _short(text: str) -> str:
    return shortened(plain(text), at_most=_MAX_CHARS)
