"""One compile that all ranks made -> what is listed about it, and the one finding that explains the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tpcompile.evidence import parametric
from tpcompile.evidence.align import Slot
from tpcompile.evidence.blamed import rank_group
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import Domain, group_by
from tpcompile.evidence.headline import headline
from tpcompile.evidence.layers import SPECS
from tpcompile.evidence.layers.kernels import is_reordered
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, Groups, Items, Row
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, RankGroup, RankRead, value_item
from tpcompile.evidence.rows import rows_of

Key = tuple[Layer, str]
"""A layer and the part of it."""


def environment(domain: Domain) -> list[Divergence]:
    """What differs between the ranks themselves."""
    groups = group_by({d.rank: d.environment for d in domain.ranks})
    if len(groups) == 1:
        return []
    items = tuple(domain.items(ranks[0], -1, Layer.ENVIRONMENT) for ranks in groups)
    found = _Layer(domain, None, (Layer.ENVIRONMENT, ""), groups, items)
    found.split()
    return found.listed if found.difference is None else [*found.listed, found.red()]


def of_slot(domain: Domain, slot: Slot) -> list[Divergence]:
    """What differs in one compile."""
    keys = dict.fromkeys((d.layer, d.part) for c in slot.compiles.values() for d in c.layers)
    order = list(SPECS)
    differing = [key for key in keys if len(_groups(slot, key)) > 1]
    differing.sort(key=lambda key: (order.index(key[0]), key[1] != "forward"))
    strict = [_of_key(domain, slot, key, differing) for key in differing if SPECS[key[0]].is_strict]
    listed = [divergence for layer in strict for divergence in layer.listed]
    red = [layer for layer in strict if layer.difference is not None]
    if not red:
        return [*listed, *(_lowered(domain, slot, differing) or _backends(domain, slot))]
    # Of several layers the one that names most directly what happened; the others are its consequences.
    first = min(red, key=lambda layer: layer.explanation.directness)
    if first.key[0] == Layer.COLLECTIVES:
        # A backend that does not lower leaves the collectives of the Dynamo graph, worded differently.
        return [*listed, *(_backends(domain, slot) or [first.red()])]
    return [*listed, first.red()]


def _groups(slot: Slot, key: Key) -> Groups:
    return slot.groups(*key)


def _items(domain: Domain, slot: Slot, groups: Groups, key: Key) -> Items:
    firsts = [slot.compiles[ranks[0]] for ranks in groups]
    pairs = zip(groups, firsts, strict=True)
    return tuple(domain.items(ranks[0], compile_.index, *key) for ranks, compile_ in pairs)


def _of_key(domain: Domain, slot: Slot, key: Key, differing: Sequence[Key]) -> _Layer:
    groups = _groups(slot, key)
    layer = _Layer(domain, slot, key, groups, _items(domain, slot, groups, key), differing)
    layer.split()
    return layer


@dataclass
class _Layer:
    """One layer in which groups of ranks differ."""

    domain: Domain
    slot: Slot | None
    key: Key
    groups: Groups
    all_items: Items
    differing: Sequence[Key] = ()
    listed: list[Divergence] = field(default_factory=list)
    """What is declared, or follows the rank's coordinate."""
    difference: Difference | None = None
    """What is left."""
    _explanation: Explanation | None = None

    def split(self) -> None:
        """Tell what is declared, or follows the rank's coordinate, from what is left."""
        layer = self.key[0]
        differing = rows_of(self.all_items, is_ordered=SPECS[layer].is_ordered)
        rows = self._without_parametric(differing)
        reasons = [self.domain.reason(layer, row) for row in rows]
        declared = next((pair for pair in zip(rows, reasons, strict=True) if pair[1]), None)
        if declared is not None:
            row, reason = declared
            self.listed.append(self._listed(row, DivergenceClass.DECLARED, headline(row, self.groups), reason))
        left = tuple(row for row, reason in zip(rows, reasons, strict=True) if not reason)
        if left:
            self.difference = Difference(layer, self.groups, self.all_items, left, self)

    def _without_parametric(self, rows: Sequence[Row]) -> Sequence[Row]:
        places = self.coordinates()
        has_equal_collectives = not self.differs(Layer.COLLECTIVES)
        if self.key[0] == Layer.GUARDS:
            followed = [row for row in rows if parametric.is_uneven_shard(row, places)]
            text = f"{len(followed)} guard(s) on shards of different sizes: the ranks do not divide the dimension"
        elif self.key[0] == Layer.LOWERED and has_equal_collectives:
            followed = parametric.constants(self.all_items, places) or []
            text = f"{len(followed)} lowered constant(s) follow the rank's coordinate under equal Dynamo graphs"
            rows = [] if followed else rows
        else:
            return rows
        if followed:
            self.listed.append(self._listed(followed[0], DivergenceClass.RANK_PARAMETRIC, text))
        return [row for row in rows if row not in followed]

    @property
    def explanation(self) -> Explanation:
        """Why it differs."""
        assert self.difference is not None, "only what is left is explained"
        if self._explanation is None:
            self._explanation = SPECS[self.key[0]].explain(self.difference)
        return self._explanation

    # What an explanation may ask of the compile.

    def items(self, layer: Layer) -> Items:
        """Items of another layer, for the groups of this one; none where that layer was not observed."""
        if self.slot is None:
            return tuple(() for _ in self.groups)
        shas = [self.slot.compiles[ranks[0]].sha(layer) for ranks in self.groups]
        if None in shas:
            return tuple(() for _ in self.groups)
        return _items(self.domain, self.slot, self.groups, (layer, ""))

    def differs(self, layer: Layer) -> bool:
        """True when the hashes of that layer differ."""
        return any(key[0] == layer for key in self.differing)

    def is_symbolic(self) -> tuple[bool, ...]:
        """For each group: a size is a symbol."""
        compiles = self.slot.compiles if self.slot else {}
        return tuple(compiles[ranks[0]].is_dynamic for ranks in self.groups if ranks[0] in compiles)

    def coordinates(self) -> Groups:
        """For each group: places of its ranks in the domain."""
        places = {d.rank: d.coordinate for d in self.domain.ranks}
        return tuple(tuple(places[rank] for rank in ranks) for ranks in self.groups)

    def rank_reads(self) -> Sequence[RankRead]:
        """Sure reads of the rank in the traced code of this frame."""
        if self.slot is None:
            return ()
        reads = [read for d in self.domain.ranks for read in d.suspects if read.what == "read"]
        return [read for read in reads if read.is_sure and read.where.endswith(self.slot.frame)]

    # Findings.

    def red(self) -> Divergence:
        """The finding; the ranks that evidence names come last."""
        found = self.explanation
        order = self._order(found)
        groups = self._ranks_of(order)
        row = found.row.picked(order)
        guard = self._guard(order)
        # In generated code only the calls themselves say whether the ranks will wait for each other.
        follows = self.key[0] != Layer.KERNELS and self.differs(Layer.COLLECTIVES)
        later = dict.fromkeys(layer for layer, _ in self.differing if layer != self.key[0])
        return Divergence(
            layer=self.key[0],
            cls=DivergenceClass.COLLECTIVES if found.hangs or follows else DivergenceClass.CONTENT,
            domain=self.domain.name,
            where=self._where(),
            groups=rank_groups(groups, row, self.slot, found.cause),
            title=found.headline or headline(row, groups),
            cause=found.cause,
            guard=_says(guard, -1),
            held=_says(guard, 0),
            step=self.slot.step if self.slot else None,
            is_rank_known=0 < len(found.guilty) < len(groups),
            advice=found.cause.advice,
            consequences=tuple(later),
        )

    def _order(self, found: Explanation) -> list[int]:
        """Groups to show: those that evidence names last, and one for all ranks that run the same program.

        Each rank may have a guard of its own on its rank, and one of them alone a different program.
        """
        order = sorted(range(len(self.groups)), key=lambda index: index in found.guilty)
        programs = self._programs() if found.directness == Directness.VALUE else ()
        if len(programs) < 2:
            return order
        return [next(index for index in order if self.groups[index][0] == ranks[0]) for ranks in programs]

    def _programs(self) -> Groups:
        """Ranks by program, where each program is that of one or several groups; else nothing."""
        if self.slot is None or not self.differs(Layer.GRAPH):
            return ()
        programs = _groups(self.slot, (Layer.GRAPH, ""))
        firsts = {ranks[0] for ranks in self.groups}
        is_split = all(any(set(ranks) <= set(own) for own in programs) for ranks in self.groups)
        return programs if is_split and firsts.issuperset(own[0] for own in programs) else ()

    def _ranks_of(self, order: Sequence[int]) -> Groups:
        """The groups of that order; those that are not shown belong to the one with the same program."""
        if len(order) == len(self.groups):
            return tuple(self.groups[index] for index in order)
        return self._programs()

    def _guard(self, order: Sequence[int]) -> Row:
        """The guard behind the difference: the explanation's, or the first that all ranks have each their own."""
        guard = self.explanation.guard
        if not guard and self.key[0] == Layer.GRAPH and self.differs(Layer.GUARDS):
            rows = rows_of(self.items(Layer.GUARDS), is_ordered=False)
            guard = next((row for row in rows if all(item and "value" in item.notes for item in row)), Row())
        return guard.picked(order) if guard else guard

    def _listed(self, row: Row, cls: DivergenceClass, title: str, reason: str = "") -> Divergence:
        cause = Cause.RANK_PARAMETRIC if cls == DivergenceClass.RANK_PARAMETRIC else Cause.UNKNOWN
        return Divergence(
            layer=self.key[0],
            cls=cls,
            domain=self.domain.name,
            where=self._where(),
            groups=rank_groups(self.groups, row, self.slot, cause),
            title=title,
            cause=cause,
            step=self.slot.step if self.slot else None,
            advice=f"declared: {reason}" if reason else cause.advice,
        )

    def _where(self) -> str:
        if self.slot is None:
            return ""
        part = self.key[1]
        return f"{self.slot.where} ({part})" if part else self.slot.where


def _says(guard: Row, index: int) -> str:
    """A guard of one side; nothing unless both sides have one."""
    if not guard or None in guard:
        return ""
    item = guard[index]
    return item.says if item else ""


def rank_groups(groups: Groups, row: Row, slot: Slot | None, cause: Cause) -> tuple[RankGroup, ...]:
    """Groups with what they have, and the line of the frame."""
    compiles = slot.compiles if slot else {}
    pairs = zip(groups, row, strict=True)
    return tuple(rank_group(ranks, item, compiles.get(ranks[0]), cause) for ranks, item in pairs)


def _lowered(domain: Domain, slot: Slot, differing: Sequence[Key]) -> list[Divergence]:
    """What differs below equal programs.

    A declared input or constant is in the lowered graph too, and both are in the code made from it; a declared guard
    is not. Shards of different sizes have different shapes all the way down. A matmul padded in the forward is padded
    in the backward. Nothing of that explains why the code issues its collectives in another order.
    """
    found: list[Divergence] = []
    is_declared = any(SPECS[layer].is_strict and layer != Layer.GUARDS for layer, _ in differing)
    is_all_explained = is_declared or _is_uneven(domain, slot, differing)
    for key in differing:
        layer, part = key
        if SPECS[layer].is_strict:
            continue
        is_below = layer == Layer.KERNELS and (Layer.LOWERED, part) in differing
        if (is_all_explained or is_below) and not _is_reordered(domain, slot, key, differing):
            continue
        here = _of_key(domain, slot, key, differing)
        found += here.listed
        if here.difference is None:
            continue
        divergence = here.red()
        found.append(divergence)
        if not divergence.is_choice:
            break
        is_all_explained = True
    return found


def _is_uneven(domain: Domain, slot: Slot, differing: Sequence[Key]) -> bool:
    """True when the guards say that the ranks hold shards of different sizes."""
    guards = [key for key in differing if key[0] == Layer.GUARDS]
    listed = [divergence for key in guards for divergence in _of_key(domain, slot, key, differing).listed]
    return any(divergence.cls == DivergenceClass.RANK_PARAMETRIC for divergence in listed)


def _is_reordered(domain: Domain, slot: Slot, key: Key, differing: Sequence[Key]) -> bool:
    """True when the code issues its collectives in another order, although the graphs have the same."""
    if key[0] != Layer.KERNELS or (Layer.COLLECTIVES, "") in differing:
        return False  # declared: the code follows
    return is_reordered(_items(domain, slot, _groups(slot, key), key))


def _backends(domain: Domain, slot: Slot) -> list[Divergence]:
    """Ranks that lowered the same frame further than others, although none loaded it from a cache."""
    if any(event.endswith("_hit") for c in slot.compiles.values() for event in c.cache):
        return []
    if any(d.is_cut for d in domain.ranks):
        return []
    reached = {rank: _reached({layer.layer for layer in c.layers}) for rank, c in slot.compiles.items()}
    groups = group_by(reached)
    if len(groups) == 1 or "" in reached.values():
        return []
    row = Row(value_item("torch.compile went down to", reached[ranks[0]]) for ranks in groups)
    return [
        Divergence(
            layer=Layer.LOWERED,
            cls=DivergenceClass.CONTENT,
            domain=domain.name,
            where=slot.where,
            groups=rank_groups(groups, row, slot, Cause.BACKEND),
            title=headline(row, groups),
            cause=Cause.BACKEND,
            step=slot.step,
            advice=Cause.BACKEND.advice,
        )
    ]


def _reached(layers: set[Layer]) -> str:
    """How far a compile went; nothing for a frame without a graph."""
    if Layer.GUARDS not in layers or Layer.COLLECTIVES not in layers:
        return ""
    if Layer.KERNELS in layers:
        return "generated code"
    return "lowered graphs" if Layer.LOWERED in layers else "the Dynamo graph"
