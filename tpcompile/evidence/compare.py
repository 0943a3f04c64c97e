"""`RankDigest`s of all ranks -> `Divergence`s, first difference first.

Hashes decide whether anything differs; only then `fetch` is asked for the items of the layers that do, once per
group of equal ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from tpcompile.evidence import advice, parametric
from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.digest import SEPARATOR, UNORDERED
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    Item,
    Layer,
    RankDigest,
    RankGroup,
)

_BRIEF = 80
_REFERENCE = re.compile(r"%\d+")

Fetch = Callable[[int, int, Layer, str], Sequence[Item]]
"""(rank, compile index, layer, part) -> items; index -1 is the rank itself, for the environment."""

Allowed = Sequence[tuple[str, str, str]]
"""(layer, text the item contains, reason) of every intended difference."""

_PARTS = [(Layer.INPUTS, ""), (Layer.GRAPH, ""), (Layer.GUARDS, ""), (Layer.COLLECTIVES, ""),
          (Layer.LOWERED, "forward"), (Layer.LOWERED, "backward"),
          (Layer.KERNELS, "forward"), (Layer.KERNELS, "backward")]  # fmt: skip


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
        self.coordinates = {d.rank: d.coordinate for d in ranks}

    def divergences(self) -> Iterator[Divergence]:
        yield from self.environment()
        slots = align(self.ranks)
        for slot in slots:
            yield from self.missing(slot) or self.layers(slot)
        yield from self.labels(slots)

    def environment(self) -> Iterator[Divergence]:
        groups = _group({d.rank: d.environment for d in self.ranks})
        if len(groups) > 1:
            items = [tuple(self.fetch(ranks[0], -1, Layer.ENVIRONMENT, "")) for ranks in groups]
            yield from self.explain(Layer.ENVIRONMENT, "", groups, items, hang=False, later=[])

    def missing(self, slot: Slot) -> list[Divergence]:
        absent = tuple(d.rank for d in self.ranks if d.rank not in slot.compiles)
        if not absent:
            return []
        present = tuple(sorted(slot.compiles))
        first = slot.compiles[present[0]]
        collectives = next((d for d in first.layers if d.layer == Layer.COLLECTIVES), None)
        hangs = collectives is not None and collectives.num_items > 0
        items = self.fetch(present[0], first.index, Layer.GRAPH, "")
        shown = next((i for i in items if i.line is not None), items[0] if items else None)
        return [
            Divergence(
                layer=Layer.GRAPH,
                cls=DivergenceClass.COLLECTIVES if hangs else DivergenceClass.CONTENT,
                domain=self.name,
                where=slot.where,
                groups=(RankGroup(ranks=present, item=shown), RankGroup(ranks=absent)),
                title=f"compiled on rank {ranks_text(present)} only, not on rank {ranks_text(absent)}",
                advice=advice.ONE_RANK_COMPILE,
            )
        ]

    def layers(self, slot: Slot) -> Iterator[Divergence]:
        differing = [(layer, part) for layer, part in _PARTS if len(self.groups(slot, layer, part)) > 1]
        if not differing:
            return
        hang = (Layer.COLLECTIVES, "") in differing
        strict = [pair for pair in differing if pair[0] not in (Layer.LOWERED, Layer.KERNELS)]
        if strict:
            red = False
            for layer, part in strict:
                found = list(self.difference(slot, layer, part, hang=hang, later=differing))
                yield from found
                red = red or any(d.is_red for d in found)
                if red:
                    return  # everything after the first red layer is its consequence
            if any(layer != Layer.GUARDS for layer, _ in strict):
                return  # a declared input or constant is in the lowered graph too; a declared guard is not
        for layer, part in (pair for pair in differing if pair not in strict):
            if layer == Layer.KERNELS and (Layer.LOWERED, part) in differing:
                continue  # constants of the lowered graph are in the code made from it
            found = list(self.difference(slot, layer, part, hang=hang, later=differing))
            yield from found
            if any(d.is_red for d in found):
                return

    def groups(self, slot: Slot, layer: Layer, part: str) -> list[tuple[int, ...]]:
        shas = {rank: c.sha(layer, part) for rank, c in slot.compiles.items()}
        return _group({rank: sha for rank, sha in shas.items() if sha is not None})

    def difference(
        self, slot: Slot, layer: Layer, part: str, *, hang: bool, later: list[tuple[Layer, str]]
    ) -> Iterator[Divergence]:
        groups = self.groups(slot, layer, part)
        items = [tuple(self.fetch(r[0], slot.compiles[r[0]].index, layer, part)) for r in groups]
        if layer == Layer.LOWERED and not hang:
            coordinates = [self.coordinates[ranks[0]] for ranks in groups]
            constants = parametric.constants(items, coordinates) if all(len(r) == 1 for r in groups) else None
            if constants:
                yield self.parametric(slot, part, groups, constants)
                return
        yield from self.explain(layer, _where(slot, part), groups, items, hang=hang, later=later)

    def parametric(
        self, slot: Slot, part: str, groups: list[tuple[int, ...]], constants: Sequence[Sequence[Item]]
    ) -> Divergence:
        first = constants[0]
        return Divergence(
            layer=Layer.LOWERED,
            cls=DivergenceClass.RANK_PARAMETRIC,
            domain=self.name,
            where=_where(slot, part),
            groups=tuple(RankGroup(ranks=r, item=item) for r, item in zip(groups, first, strict=True)),
            title=f"{len(constants)} lowered constant(s) follow the rank's coordinate under equal Dynamo graphs",
            advice=advice.RANK_PARAMETRIC,
        )

    def explain(
        self,
        layer: Layer,
        where: str,
        groups: list[tuple[int, ...]],
        items: list[tuple[Item, ...]],
        *,
        hang: bool,
        later: list[tuple[Layer, str]],
    ) -> Iterator[Divergence]:
        differences = differing_items(items, ordered=layer not in UNORDERED)
        declared: list[tuple[tuple[Item | None, ...], str]] = []
        open_: list[tuple[tuple[Item | None, ...], str]] = []
        for found in differences:
            reason = self.reason(layer, found)
            (declared if reason else open_).append((found, reason))
        for found, reason in declared[:1]:
            yield self.divergence(layer, where, groups, found, DivergenceClass.DECLARED, f"declared: {reason}")
        if open_:
            cls = DivergenceClass.COLLECTIVES if hang else DivergenceClass.CONTENT
            order = list(Layer)
            consequences = tuple(dict.fromkeys(x for x, _ in later if order.index(x) > order.index(layer)))
            text = advice.for_difference(layer, [item for item in open_[0][0] if item is not None])
            if consequences:
                text += f" Also different, as a consequence: {', '.join(consequences)}."
            divergence = self.divergence(layer, where, groups, open_[0][0], cls, text)
            yield divergence.model_copy(update={"consequences": consequences})

    def reason(self, layer: Layer, found: Sequence[Item | None]) -> str:
        texts = [item.text for item in found if item is not None]
        for allowed_layer, contains, reason in self.allowed:
            if allowed_layer == layer and texts and all(contains in text for text in texts):
                return reason
        return ""

    def divergence(
        self,
        layer: Layer,
        where: str,
        groups: list[tuple[int, ...]],
        found: Sequence[Item | None],
        cls: DivergenceClass,
        text: str,
    ) -> Divergence:
        return Divergence(
            layer=layer,
            cls=cls,
            domain=self.name,
            where=where,
            groups=tuple(RankGroup(ranks=r, item=item) for r, item in zip(groups, found, strict=True)),
            title=_title(layer, groups, found),
            advice=text,
        )

    def labels(self, slots: list[Slot]) -> Iterator[Divergence]:
        """Equal content under other labels or in another order: information."""
        complete = [slot for slot in slots if len(slot.compiles) == len(self.ranks)]
        orders = {d.rank: _order(d, complete) for d in self.ranks}
        labels = {d.rank: tuple(slot.compiles[d.rank].compile_id for slot in complete) for d in self.ranks}
        for what, by_rank in (("order of compiles", orders), ("compile ids", labels)):
            groups = _group({rank: str(value) for rank, value in by_rank.items()})
            if len(groups) > 1:
                yield Divergence(
                    layer=Layer.GRAPH,
                    cls=DivergenceClass.LABEL,
                    domain=self.name,
                    where="",
                    groups=tuple(
                        RankGroup(ranks=r, item=Item(text=f"{what}{SEPARATOR}{by_rank[r[0]]}")) for r in groups
                    ),
                    title=f"{what} differ, content is equal",
                    advice=advice.LABEL_ONLY,
                )
                return


def _order(digest: RankDigest, slots: list[Slot]) -> tuple[int, ...]:
    positions = {slot.compiles[digest.rank].index: number for number, slot in enumerate(slots)}
    return tuple(positions[index] for index in sorted(positions))


def _where(slot: Slot, part: str) -> str:
    return f"{slot.where}{f' ({part})' if part else ''}"


def _group(values: dict[int, str]) -> list[tuple[int, ...]]:
    """Ranks by equal value, largest group first: the odd ones out come last."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return sorted((tuple(ranks) for ranks in groups.values()), key=lambda ranks: (-len(ranks), ranks[0]))


def differing_items(items: Sequence[Sequence[Item]], *, ordered: bool) -> list[tuple[Item | None, ...]]:
    """Rows of items, one per group, wherever the groups do not all say the same; None where a group has nothing."""
    if ordered:
        rows = [r for r in zip_longest(*items) if len({item.text if item else None for item in r}) > 1]
        return _inserted(items) or rows
    texts = [{item.text for item in group} for group in items]
    common = set.intersection(*texts)
    about: dict[str, list[list[Item]]] = {}
    for position, group in enumerate(items):
        for item in group:
            if item.text not in common:
                about.setdefault(item.text.partition(SEPARATOR)[0], [[] for _ in items])[position].append(item)
    found = [row for columns in about.values() for row in zip_longest(*columns)]
    # A value that differs says more than a thing only one side has.
    return sorted(found, key=lambda row: sum(item is None for item in row))


def _title(layer: Layer, groups: list[tuple[int, ...]], found: Sequence[Item | None]) -> str:
    have = [(ranks, item) for ranks, item in zip(groups, found, strict=True) if item is not None]
    says = [_brief(item) for _, item in have]
    if len(have) < len(groups):
        who = ", ".join(ranks_text(ranks) for ranks, _ in have)
        return f"{layer}: {_subject(layer, have[0][1])}{says[0]} on rank {who} only" if says else f"{layer} differs"
    about = have[0][1].text.partition(SEPARATOR)[0].removeprefix("call ")
    return f"{layer} differs at {about}: {' against '.join(dict.fromkeys(says))}"


def _subject(layer: Layer, item: Item) -> str:
    """What an item is about, where that is a name and not a position."""
    about = item.text.partition(SEPARATOR)[0]
    named = layer in (Layer.ENVIRONMENT, Layer.INPUTS, Layer.KERNELS) or about.startswith(
        ("graph break", "compile failed")
    )
    return f"{about}: " if named else ""


def _brief(item: Item) -> str:
    """What an item says, short enough for a title."""
    about, _, says = item.text.partition(SEPARATOR)
    text = (says or about).removeprefix("call ").partition(" -> ")[0]
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 3]}..."


def _inserted(items: Sequence[Sequence[Item]]) -> list[tuple[Item | None, ...]]:
    """When some groups have one item more at the first difference, show that item, not all that moved behind it."""
    keys = [[_without_position(item.text) for item in group] for group in items]
    start = next((i for i, column in enumerate(zip(*keys, strict=False)) if len(set(column)) > 1), None)
    if start is None or len({len(group) for group in items}) == 1:
        return []
    short = min(range(len(items)), key=lambda g: len(items[g]))
    row: list[Item | None] = [None] * len(items)
    for g, group in enumerate(items):
        extra = len(group) - len(items[short])
        moved = keys[g][start + extra : start + extra + 1] == keys[short][start : start + 1]
        if extra and moved:
            row[g] = group[start]
        elif extra or keys[g][start] != keys[short][start]:
            return []
    return [tuple(row)]


def _without_position(text: str) -> str:
    """An item without the numbers that an insertion before it shifts."""
    return _REFERENCE.sub("%", text)


def equal_groups(digests: Sequence[RankDigest]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Domain -> groups of ranks whose whole digest is equal, for the table of a report."""
    result = {}
    for domain in sorted({d.domain for d in digests}):
        values = {d.rank: d.environment + "".join(map(_sha_text, d.compiles)) for d in digests if d.domain == domain}
        result[domain] = tuple(_group(values))
    return result


def _sha_text(compile_: CompileDigest) -> str:
    return "".join(layer.sha256 for layer in compile_.layers)
