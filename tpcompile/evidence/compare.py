"""`RankDigest`s of all ranks -> `Divergence`s, first difference first.

Hashes decide whether anything differs; only then `fetch` is asked for the items of the layers that do, once per
group of equal ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.evidence import classify, parametric
from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.digest import SEPARATOR, UNORDERED, UNUSED
from tpcompile.evidence.onerank import one_rank
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    Item,
    Layer,
    RankDigest,
    RankGroup,
)
from tpcompile.evidence.rows import Fetch, Row, differing_items, moved_rows, title

Allowed = Sequence[tuple[str, str, str]]
"""(layer, text the item contains, reason) of every intended difference."""

_PARTS = [(Layer.INPUTS, ""), (Layer.GRAPH, ""), (Layer.GUARDS, ""), (Layer.COLLECTIVES, ""),
          (Layer.LOWERED, "forward"), (Layer.LOWERED, "backward"),
          (Layer.KERNELS, "forward"), (Layer.KERNELS, "backward")]  # fmt: skip
_UPSTREAM = frozenset({Cause.RANK_BRANCH, Cause.RANK_CONSTANT, Cause.UNKNOWN})
"""Causes in the graph that say less than the collectives do, when those differ too."""

_METADATA = frozenset({Cause.SHAPE, Cause.DTYPE, Cause.STRIDE})
"""Causes by which the same call has another result."""

Groups = list[tuple[int, ...]]
Items = list[tuple[Item, ...]]


def compare(digests: Sequence[RankDigest], fetch: Fetch, *, allowed: Allowed = ()) -> tuple[Divergence, ...]:
    """Compare the ranks of every symmetry domain, layer by layer from cause to effect."""
    domains = sorted({d.domain for d in digests})
    return tuple(
        divergence
        for domain in domains
        for ranks in [sorted((d for d in digests if d.domain == domain), key=lambda d: d.rank)]
        for divergence in _Domain(domain, ranks, fetch, allowed).divergences()
    )


class _Domain:
    """Ranks that must agree, and the questions asked of them."""

    def __init__(self, name: str, ranks: Sequence[RankDigest], fetch: Fetch, allowed: Allowed) -> None:
        self.name, self.ranks, self.fetch, self.allowed = name, ranks, fetch, allowed
        self.known: dict[tuple[int, int, Layer, str], tuple[Item, ...]] = {}
        self.coordinates = {d.rank: d.coordinate for d in ranks}

    def divergences(self) -> Iterator[Divergence]:
        yield from self.environment()
        slots = align(self.ranks)
        broken: set[int] = set()
        for slot in slots:
            absent = tuple(d.rank for d in self.ranks if d.rank not in slot.compiles and not d.is_cut)
            if absent and broken.issuperset(slot.compiles):
                continue  # what comes after a graph break that is named already
            found = list(one_rank(slot, absent, self.ranks, self.fetch, self.name) if absent else self.layers(slot))
            for divergence in found:
                if divergence.cause == Cause.GRAPH_BREAK:
                    broken.update(divergence.groups[-1].ranks)
            yield from found
        yield from self.labels(slots)
        yield from self.caches(slots)

    def environment(self) -> Iterator[Divergence]:
        groups = group_by({d.rank: d.environment for d in self.ranks})
        if len(groups) > 1:
            items = [tuple(self.fetch(ranks[0], -1, Layer.ENVIRONMENT, "")) for ranks in groups]
            yield from self.explain(_Finding(self, None, Layer.ENVIRONMENT, "", groups, items, []))

    def layers(self, slot: Slot) -> Iterator[Divergence]:
        differing = [(layer, part) for layer, part in _PARTS if len(self.groups(slot, layer, part)) > 1]
        broken = self.broken(slot, differing)
        if broken:
            yield from self.explain(broken)
            return
        strict = [pair for pair in differing if pair[0] not in (Layer.LOWERED, Layer.KERNELS)]
        for layer, part in strict:
            found = list(self.difference(slot, layer, part, differing))
            yield from found
            if any(d.is_red for d in found):
                return  # everything after the first red layer is its consequence
        # A declared input or constant is in the lowered graph too, and both are in the code made from it; a declared
        # guard is not. A matmul padded in the forward is padded in the backward. Nothing of that explains why the code
        # issues its collectives in another order.
        is_all_explained = any(layer != Layer.GUARDS for layer, _ in strict)
        for layer, part in (pair for pair in differing if pair not in strict):
            is_explained = is_all_explained or (layer == Layer.KERNELS and (Layer.LOWERED, part) in differing)
            if is_explained and not (layer == Layer.KERNELS and self.is_reordered(slot, part, differing)):
                continue
            found = list(self.difference(slot, layer, part, differing))
            yield from found
            if any(d.is_red and not d.is_choice for d in found):
                return
            is_all_explained = is_all_explained or any(d.is_choice for d in found)

    def broken(self, slot: Slot, differing: list[tuple[Layer, str]]) -> _Finding | None:
        """Breaks and failures that not all ranks have.

        They end a graph early, so inputs, guards and ops that come later are missing: all of that is a consequence.
        """
        if (Layer.GRAPH, "") not in differing:
            return None
        groups = self.groups(slot, Layer.GRAPH, "")
        items = self.items(slot, groups, Layer.GRAPH)
        ends = [tuple(item for item in group if classify.is_break_or_failure(item)) for group in items]
        if len({tuple(item.text for item in group) for group in ends}) == 1:
            return None
        return _Finding(self, slot, Layer.GRAPH, "", groups, ends, differing)

    def is_reordered(self, slot: Slot, part: str, differing: list[tuple[Layer, str]]) -> bool:
        """True when the code issues its collectives in another order, although the graphs have the same."""
        if (Layer.COLLECTIVES, "") in differing:
            return False  # declared: the code follows
        groups = self.groups(slot, Layer.KERNELS, part)
        return classify.reordered(self.items(slot, groups, Layer.KERNELS, part))

    def groups(self, slot: Slot, layer: Layer, part: str) -> Groups:
        shas = {rank: c.sha(layer, part) for rank, c in slot.compiles.items()}
        return group_by({rank: sha for rank, sha in shas.items() if sha is not None})

    def items(self, slot: Slot, groups: Groups, layer: Layer, part: str = "") -> Items:
        return [self.fetched(ranks[0], slot.compiles[ranks[0]].index, layer, part) for ranks in groups]

    def fetched(self, rank: int, index: int, layer: Layer, part: str) -> tuple[Item, ...]:
        key = rank, index, layer, part
        if key not in self.known:
            self.known[key] = tuple(self.fetch(*key))
        return self.known[key]

    def difference(
        self, slot: Slot, layer: Layer, part: str, differing: list[tuple[Layer, str]]
    ) -> Iterator[Divergence]:
        groups = self.groups(slot, layer, part)
        items = self.items(slot, groups, layer, part)
        if layer == Layer.LOWERED and (Layer.COLLECTIVES, "") not in differing:
            coordinates = [self.coordinates[ranks[0]] for ranks in groups]
            constants = parametric.constants(items, coordinates) if all(len(r) == 1 for r in groups) else None
            if constants:
                text = f"{len(constants)} lowered constant(s) follow the rank's coordinate under equal Dynamo graphs"
                yield self.parametric(slot, layer, part, groups, constants[0], text)
                return
        yield from self.explain(_Finding(self, slot, layer, part, groups, items, differing))

    def uneven(self, finding: _Finding) -> list[Row]:
        """Guards on shards of a dimension that the ranks do not divide: each follows the rank's coordinate."""
        if finding.layer != Layer.GUARDS:
            return []
        coordinates = [[self.coordinates[rank] for rank in ranks] for ranks in finding.groups]
        rows = differing_items(finding.items, ordered=False)
        return [row for row in rows if parametric.is_uneven_shard(row, coordinates)]

    def parametric(self, slot: Slot, layer: Layer, part: str, groups: Groups, row: Row, title: str) -> Divergence:
        return Divergence(
            layer=layer,
            cls=DivergenceClass.RANK_PARAMETRIC,
            domain=self.name,
            where=_where(slot, part),
            groups=_rank_groups(slot, groups, row),
            title=title,
            cause=Cause.RANK_PARAMETRIC,
            step=slot.step,
            advice=Cause.RANK_PARAMETRIC.advice,
        )

    def explain(self, finding: _Finding) -> Iterator[Divergence]:
        declared: list[tuple[Row, str]] = []
        open_: list[Row] = []
        row: Row
        uneven = self.uneven(finding)
        if uneven and finding.slot:
            counted = f"{len(uneven)} guard(s) on shards of different sizes: the ranks do not divide the dimension"
            yield self.parametric(finding.slot, finding.layer, finding.part, finding.groups, uneven[0], counted)
        for row in differing_items(finding.items, ordered=finding.layer not in UNORDERED):
            if row in uneven:
                continue
            reason = self.reason(finding.layer, row)
            if reason:
                declared.append((row, reason))
            else:
                open_.append(row)
        for row, reason in declared[:1]:
            text = {"advice": f"declared: {reason}", "cls": DivergenceClass.DECLARED, "consequences": ()}
            yield finding.divergence([row]).model_copy(update=text)
        if declared and not open_ and finding.layer not in UNORDERED:
            open_ = self.behind_declared(finding)
        if open_:
            yield finding.divergence(open_)

    def behind_declared(self, finding: _Finding) -> list[Row]:
        """What else differs where a declared item that only some ranks have moved everything behind it."""
        kept = [[i for i in group if not self.reason(finding.layer, [i])] for group in finding.items]
        return [row for row in moved_rows(kept) if not self.reason(finding.layer, row)]

    def reason(self, layer: Layer, row: Row) -> str:
        texts = [item.text for item in row if item is not None]
        for allowed_layer, contains, reason in self.allowed:
            if allowed_layer == layer and texts and all(contains in text for text in texts):
                return reason
        return ""

    def labels(self, slots: list[Slot]) -> Iterator[Divergence]:
        """Equal content under other labels or in another order: information, unless collectives change places."""
        complete = [slot for slot in slots if len(slot.compiles) == len(self.ranks)]
        swapped = self.swapped(
            [s for s in complete if any(c.num_items(Layer.COLLECTIVES) for c in s.compiles.values())]
        )
        if swapped is not None:
            yield swapped
            return
        orders = {d.rank: _order(d, complete) for d in self.ranks}
        labels = {d.rank: tuple(slot.compiles[d.rank].compile_id for slot in complete) for d in self.ranks}
        for what, by_rank in (("order of compiles", orders), ("compile ids", labels)):
            values = {rank: f"{what}{SEPARATOR}{value}" for rank, value in by_rank.items()}
            if len(set(values.values())) > 1:
                text = f"{what} differ, content is equal"
                yield self.information(Layer.GRAPH, Cause.COMPILE_ORDER, values, text)
                return

    def swapped(self, slots: list[Slot]) -> Divergence | None:
        """Programs with collectives that ranks entered in another order: code runs when it is compiled.

        Variants of one function that issue the same collectives may change places.
        """
        groups = group_by({d.rank: str([_issues(slot) for slot in _entered(slots, d.rank)]) for d in self.ranks})
        if len(groups) == 1:
            return None
        orders = [_entered(slots, ranks[0]) for ranks in groups]
        columns = enumerate(zip(*orders, strict=True))
        place = next(i for i, column in columns if len({_issues(slot) for slot in column}) > 1)
        entered = [(ranks, order[place].compiles[ranks[0]]) for ranks, order in zip(groups, orders, strict=True)]
        told = tuple(
            RankGroup(ranks=ranks, item=Item(text=f"with collectives{SEPARATOR}{c.frame} as number {place + 1}"),
                      frame_line=c.line)
            for ranks, c in entered
        )  # fmt: skip
        reason = self.reason(Layer.COLLECTIVES, [group.item for group in told])
        frames = " against ".join(f"{c.frame}{f' ({c.line})' if c.line else ''}" for _, c in entered)
        return Divergence(
            layer=Layer.COLLECTIVES,
            cls=DivergenceClass.DECLARED if reason else DivergenceClass.COLLECTIVES,
            domain=self.name,
            where=_where(orders[-1][place], ""),
            groups=told,
            title=f"programs with collectives come in another order: {frames}",
            cause=Cause.ORDER_FORWARD,
            step=orders[-1][place].step,
            advice=f"declared: {reason}" if reason else Cause.ORDER_FORWARD.advice,
        )

    def caches(self, slots: list[Slot]) -> Iterator[Divergence]:
        """Equal content, loaded from a cache by some ranks and compiled by others: information."""
        outcomes: dict[int, str] = {}
        for slot in slots:
            found = {rank: outcome for rank, c in slot.compiles.items() if (outcome := _cache_outcome(c))}
            outcomes = outcomes or (found if len(set(found.values())) > 1 else {})
        if outcomes:
            values = {rank: f"compile cache{SEPARATOR}{outcome}" for rank, outcome in outcomes.items()}
            yield self.information(Layer.KERNELS, Cause.CACHE_SPLIT, values, Cause.CACHE_SPLIT.value)

    def information(self, layer: Layer, cause: Cause, values: dict[int, str], text: str) -> Divergence:
        return Divergence(
            layer=layer,
            cls=DivergenceClass.LABEL,
            domain=self.name,
            where="",
            groups=tuple(RankGroup(ranks=r, item=Item(text=values[r[0]])) for r in group_by(values)),
            title=text,
            cause=cause,
            advice=cause.advice,
        )


class _Finding:
    """One layer in which groups of ranks differ, and what made it so."""

    def __init__(
        self,
        domain: _Domain,
        slot: Slot | None,
        layer: Layer,
        part: str,
        groups: Groups,
        items: Items,
        differing: list[tuple[Layer, str]],
    ) -> None:
        self.domain, self.slot, self.layer, self.part = domain, slot, layer, part
        self.groups, self.items, self.differing = groups, items, differing
        self.hangs = (Layer.COLLECTIVES, "") in differing

    def divergence(self, rows: Sequence[Row]) -> Divergence:
        """The finding about the row that says most."""
        row = self.blamed_last(self.shown(rows))
        cause = self.cause(row)
        hangs = self.hangs or cause in classify.HANGS
        if self.layer == Layer.KERNELS:
            hangs = classify.reordered(self.items)
        order = list(Layer)
        later = tuple(dict.fromkeys(x for x, _ in self.differing if order.index(x) > order.index(self.layer)))
        guard, held = self.guard(row)
        text = title(self.layer, self.groups, row)
        if cause == Cause.UNUSED_RESULT:
            row = self.unused() or row
        return Divergence(
            layer=self.layer,
            cls=DivergenceClass.COLLECTIVES if hangs else DivergenceClass.CONTENT,
            domain=self.domain.name,
            where=_where(self.slot, self.part) if self.slot else "",
            groups=_rank_groups(self.slot, self.groups, row),
            title=text,
            cause=cause,
            guard=guard,
            held=held,
            step=self.slot.step if self.slot else None,
            advice=cause.advice + (f" Also different, as a consequence: {', '.join(later)}." if later else ""),
            consequences=later,
        )

    def shown(self, rows: Sequence[Row]) -> Row:
        """The first row, unless a later one is the reason for it: a break or failure, or a collective that hangs."""
        if self.layer != Layer.GRAPH:
            return rows[0]
        broken = next((row for row in rows if any(i and classify.node(i) is None for i in row)), None)
        hanging = (row for row in rows if any(i and (c := classify.node(i)) and c.is_collective for i in row))
        return broken or (next(hanging, rows[0]) if self.hangs else rows[0])

    def blamed_last(self, row: Row) -> Row:
        """A break or failure stands against nothing, and the ranks that have it are the odd ones."""
        if self.layer != Layer.GRAPH or not any(i and classify.node(i) is None for i in row):
            return row
        row = [i if i and classify.node(i) is None else None for i in row]
        order = sorted(range(len(row)), key=lambda group: row[group] is not None)
        self.groups, self.items = [self.groups[g] for g in order], [self.items[g] for g in order]
        return [row[g] for g in order]

    def cause(self, row: Row) -> Cause:
        match self.layer:
            case Layer.ENVIRONMENT:
                return Cause.ENVIRONMENT
            case Layer.INPUTS:
                return classify.inputs(row, is_dynamic=len(self.dynamic()) > 1)
            case Layer.GRAPH:
                return self.graph_cause(row)
            case Layer.GUARDS:
                return classify.guards(row)
            case Layer.COLLECTIVES:
                return classify.collectives(self.items)
            case Layer.LOWERED:
                return classify.collectives(self.issued()) if self.hangs else classify.lowered(self.items, row)
            case Layer.KERNELS:
                return classify.kernels(self.items)

    def dynamic(self) -> set[bool]:
        return {c.is_dynamic for c in self.slot.compiles.values()} if self.slot else set()

    def graph_cause(self, row: Row) -> Cause:
        cause = classify.graph(row)
        if cause in _METADATA and any(i and (c := classify.node(i)) and c.is_collective for i in row):
            return Cause.COLLECTIVE_SIZES
        if self.hangs and cause in _UPSTREAM | classify.HANGS:
            return classify.collectives(self.issued())
        return Cause.UNUSED_RESULT if cause == Cause.RANK_BRANCH and self.dropped() else cause

    def issued(self) -> Items:
        assert self.slot is not None, "only a compile has collectives"
        groups = self.domain.groups(self.slot, Layer.COLLECTIVES, "")
        return self.domain.items(self.slot, groups, Layer.COLLECTIVES)

    def dropped(self) -> bool:
        """True when the same collectives are issued, and one group never reads a result."""
        if self.slot is None or not any(c.num_items(Layer.COLLECTIVES) for c in self.slot.compiles.values()):
            return False
        items = self.domain.items(self.slot, self.groups, Layer.COLLECTIVES)
        return len({tuple(item.raw for item in group) for group in items}) > 1

    def unused(self) -> Row | None:
        """The collective whose result one group drops, which comes last; None when each group drops some."""
        assert self.slot is not None, "only a compile has collectives"
        items = self.domain.items(self.slot, self.groups, Layer.COLLECTIVES)
        row = [next((item for item in group if item.raw == UNUSED), None) for group in items]
        if None not in row:
            return None
        order = sorted(range(len(row)), key=lambda group: row[group] is not None)
        self.groups, self.items = [self.groups[g] for g in order], [self.items[g] for g in order]
        return [row[g] for g in order]

    def guard(self, row: Row) -> tuple[str, str]:
        """The guard behind the difference, on the odd ranks and on the others; empty when there is none."""
        if self.layer == Layer.GUARDS:
            return _both_sides(row)
        if self.layer != Layer.GRAPH or (Layer.GUARDS, "") not in self.differing or self.slot is None:
            return "", ""
        rows = differing_items(self.domain.items(self.slot, self.groups, Layer.GUARDS), ordered=False)
        return _both_sides(rows[0]) if rows else ("", "")


def _both_sides(row: Row) -> tuple[str, str]:
    odd, usual = row[-1], row[0]
    return (classify.says(odd), classify.says(usual)) if odd and usual else ("", "")


def _order(digest: RankDigest, slots: list[Slot]) -> tuple[int, ...]:
    positions = {slot.compiles[digest.rank].index: number for number, slot in enumerate(slots)}
    return tuple(positions[index] for index in sorted(positions))


def _issues(slot: Slot) -> tuple[str, str | None]:
    """What tells slots apart for whoever waits in them; where its ranks differ, that is a finding of its own."""
    first = slot.compiles[min(slot.compiles)]
    return first.frame, first.sha(Layer.COLLECTIVES)


def _entered(slots: list[Slot], rank: int) -> list[Slot]:
    return sorted(slots, key=lambda slot: slot.compiles[rank].index)


def _where(slot: Slot, part: str) -> str:
    return f"{slot.where}{f' ({part})' if part else ''}"


def _cache_outcome(compile_: CompileDigest) -> str:
    ends = {event.rpartition("_")[2] for event in compile_.cache}
    return "miss" if "miss" in ends else "hit" if "hit" in ends else ""


def _rank_groups(slot: Slot | None, groups: Groups, row: Row) -> tuple[RankGroup, ...]:
    lines = {rank: c.line for rank, c in slot.compiles.items()} if slot else {}
    return tuple(RankGroup(ranks=r, item=i, frame_line=lines.get(r[0])) for r, i in zip(groups, row, strict=True))


def group_by(values: dict[int, str]) -> Groups:
    """Ranks by equal value, largest group first: the odd ones out come last."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return sorted((tuple(ranks) for ranks in groups.values()), key=lambda ranks: (-len(ranks), ranks[0]))


def equal_groups(digests: Sequence[RankDigest]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Domain -> groups of ranks whose whole digest is equal, for the table of a report."""
    result = {}
    for domain in sorted({d.domain for d in digests}):
        values = {d.rank: d.environment + "".join(map(_sha_text, d.compiles)) for d in digests if d.domain == domain}
        result[domain] = tuple(group_by(values))
    return result


def _sha_text(compile_: CompileDigest) -> str:
    return "".join(layer.sha256 for layer in compile_.layers)
