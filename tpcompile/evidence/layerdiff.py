"""One compile that all ranks made -> what is listed about it, and the one finding that explains the rest."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.align import Slot
from tpcompile.evidence.blamed import rank_group
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import Domain, group_by
from tpcompile.evidence.headline import headline
from tpcompile.evidence.layers import SPECS
from tpcompile.evidence.layers.kernels import is_reordered
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, Groups, Items, Row
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    Layer,
    LayerDigest,
    RankDigest,
    RankGroup,
    RankRead,
    value_item,
)
from tpcompile.evidence.rows import rows_of
from tpcompile.evidence.several import grouped

Key = tuple[Layer, str]
"""A layer and the part of it."""
_REACHED = {
    Layer.COLLECTIVES: "the Dynamo graph",
    Layer.LOWERED: "lowered graphs",
    Layer.KERNELS: "generated code",
}
"""The last layer of a compile -> how far it went."""


def environment(domain: Domain) -> list[Divergence]:
    """What differs between the ranks themselves."""
    return of_slot(domain, Slot("", "", {digest.rank: _as_compile(digest) for digest in domain.ranks}))


def _as_compile(digest: RankDigest) -> CompileDigest:
    """What belongs to the rank, in the form of a compile: details are asked for under the index -1."""
    layer = LayerDigest(layer=Layer.ENVIRONMENT, sha256=digest.environment, num_items=0)
    return CompileDigest(index=-1, compile_id="", phase="", frame="", layers=(layer,))


def of_slot(domain: Domain, slot: Slot) -> list[Divergence]:
    """What differs in one compile."""
    return _Compile(domain, slot).findings()


class _Compile:
    """One compile as all ranks saw it."""

    def __init__(self, domain: Domain, slot: Slot) -> None:
        self.domain, self.slot = domain, slot
        order = list(SPECS)
        differing = [key for key in slot.keys if len(slot.groups(*key)) > 1]
        self.differing = sorted(differing, key=lambda key: (order.index(key[0]), key[1] != "forward"))
        self.layers = list(dict.fromkeys(layer for layer, _ in self.differing))

    def findings(self) -> list[Divergence]:
        """What is listed in the user's program, and the layer that says what happened, or else what differs below."""
        strict = [self.layer(key) for key in self.differing if SPECS[key[0]].is_strict]
        red = [layer for layer in strict if layer.is_red]
        below = self.explained_by(red) if red else self.lowered(strict) or self.backends()
        return [*itertools.chain.from_iterable(layer.listed for layer in strict), *below]

    def explained_by(self, red: Sequence[_Layer]) -> list[Divergence]:
        """Of several layers the one that names most directly what happened; the others are its consequences."""
        found = min(red, key=lambda layer: layer.explanation.directness)
        # A backend that does not lower leaves the collectives of the Dynamo graph, worded differently.
        backends = self.backends() if found.layer == Layer.COLLECTIVES else []
        return backends or [found.red()]

    def layer(self, key: Key) -> _Layer:
        """One layer in which groups of ranks differ."""
        return _Layer(self, key, self.slot.groups(*key))

    def items(self, groups: Groups, key: Key) -> Items:
        """Items of a layer, for groups of ranks."""
        firsts = [ranks[0] for ranks in groups]
        return tuple(self.domain.items(rank, self.slot.compiles[rank].index, *key) for rank in firsts)

    def lowered(self, strict: Iterable[_Layer]) -> list[Divergence]:
        """What differs below equal programs.

        A declared input or constant is in the lowered graph too, and both are in the code made from it; a declared
        guard is not. Shards of different sizes have different shapes all the way down. A matmul padded in the forward
        is padded in the backward. Nothing of that explains why the code issues its collectives in another order.
        """
        found: list[Divergence] = []
        is_explained = any(layer.explains_below for layer in strict)
        for key in self.differing:
            layer, part = key
            is_below = layer == Layer.KERNELS and (Layer.LOWERED, part) in self.differing
            is_consequence = is_explained or is_below
            if SPECS[layer].is_strict or (is_consequence and not self.is_reordered(key)):
                continue
            here = self.layer(key)
            found += here.findings()
            if here.is_red and not found[-1].is_choice:
                break
            is_explained |= here.is_red
        return found

    def is_reordered(self, key: Key) -> bool:
        """True when the code issues its collectives in another order, although the graphs have the same."""
        if key[0] != Layer.KERNELS or (Layer.COLLECTIVES, "") in self.differing:
            return False  # declared: the code follows
        return is_reordered(self.items(self.slot.groups(*key), key))

    def backends(self) -> list[Divergence]:
        """Ranks that lowered the same frame further than others, although none loaded it from a cache."""
        compiles = self.slot.compiles
        is_loaded = any(compile_.is_loaded for compile_ in compiles.values())
        reached = {rank: _reached(compile_) for rank, compile_ in compiles.items()}
        groups = group_by(reached)
        if is_loaded or self.domain.is_cut or "" in reached.values() or len(groups) == 1:
            return []
        row = Row(value_item("torch.compile went down to", reached[ranks[0]]) for ranks in groups)
        return [
            Divergence(
                layer=Layer.LOWERED,
                cls=DivergenceClass.CONTENT,
                domain=self.domain.name,
                where=self.slot.where,
                groups=self.sides(groups, row, Cause.BACKEND),
                title=headline(row, groups),
                cause=Cause.BACKEND,
                step=self.slot.step,
                advice=Cause.BACKEND.advice,
            )
        ]

    def sides(self, groups: Groups, row: Row, cause: Cause) -> tuple[RankGroup, ...]:
        """Groups with what they have, and the line of the frame."""
        pairs = zip(groups, row, strict=True)
        return tuple(rank_group(ranks, item, self.slot.compiles[ranks[0]], cause) for ranks, item in pairs)


def _reached(compile_: CompileDigest) -> str:
    """How far a compile went; nothing for a frame without a graph."""
    layers = {digest.layer for digest in compile_.layers}
    if not layers.issuperset({Layer.GUARDS, Layer.COLLECTIVES}):
        return ""
    return [text for layer, text in _REACHED.items() if layer in layers][-1]


@dataclass
class _Layer:
    """One layer in which groups of ranks differ; an explanation asks it about the compile."""

    whole: _Compile
    key: Key
    groups: Groups
    listed: list[Divergence] = field(default_factory=list)
    """What is declared, or follows the rank's coordinate."""

    @property
    def layer(self) -> Layer:
        """Which layer it is."""
        return self.key[0]

    @property
    def is_red(self) -> bool:
        """True when something is left that nobody declared."""
        return bool(self.difference.rows)

    @property
    def explains_below(self) -> bool:
        """True where lowered graphs and code follow from what is listed here."""
        return self.layer != Layer.GUARDS or any(d.cls == DivergenceClass.RANK_PARAMETRIC for d in self.listed)

    def __post_init__(self) -> None:
        """Tell what is declared, or follows the rank's coordinate, from what is left."""
        spec, items = SPECS[self.layer], self.whole.items(self.groups, self.key)
        differing = rows_of(items, is_ordered=spec.is_ordered)
        followed = spec.follow(Difference(self.layer, self.groups, items, differing, self))
        if followed.rows:
            self.listed.append(self._listed(followed.rows[0], DivergenceClass.RANK_PARAMETRIC, followed.says))
        by_reason = grouped(followed.left, lambda row: self.whole.domain.reason(self.layer, row))
        left = by_reason.pop("", [])
        if by_reason:
            reason, declared = next(iter(by_reason.items()))
            title = headline(declared[0], self.groups)
            self.listed.append(self._listed(declared[0], DivergenceClass.DECLARED, title, reason))
        self.difference = Difference(self.layer, self.groups, items, tuple(left), self)

    @functools.cached_property
    def explanation(self) -> Explanation:
        """Why it differs."""
        return SPECS[self.layer].explain(self.difference)

    # What an explanation may ask of the compile.

    def items(self, layer: Layer) -> Items:
        """Items of another layer, for the groups of this one; none where that layer was not observed."""
        compiles = self.whole.slot.compiles
        if any(compiles[ranks[0]].sha(layer) is None for ranks in self.groups):
            return tuple(() for _ in self.groups)
        return self.whole.items(self.groups, (layer, ""))

    def differs(self, layer: Layer) -> bool:
        """True when the hashes of that layer differ."""
        return layer in self.whole.layers

    def is_symbolic(self) -> tuple[bool, ...]:
        """For each group: a size is a symbol."""
        return tuple(self.whole.slot.compiles[ranks[0]].is_dynamic for ranks in self.groups)

    def coordinates(self) -> Groups:
        """For each group: places of its ranks in the domain."""
        places = {d.rank: d.coordinate for d in self.whole.domain.ranks}
        return tuple(tuple(places[rank] for rank in ranks) for ranks in self.groups)

    def rank_reads(self) -> Sequence[RankRead]:
        """Sure reads of the rank in the traced code of this frame."""
        reads = itertools.chain.from_iterable(d.sure_reads for d in self.whole.domain.ranks)
        return [read for read in reads if read.where.endswith(self.whole.slot.frame)]

    # Findings.

    def findings(self) -> list[Divergence]:
        """What is listed, then what is left."""
        return [*self.listed, self.red()] if self.is_red else self.listed

    def red(self) -> Divergence:
        """The finding; the ranks that evidence names come last."""
        found = self.explanation
        order, groups = self._shown(found)
        row = found.row.picked(order)
        held, failed = _both_sides(found.guard, order)
        # In generated code only the calls themselves say whether the ranks will wait for each other.
        follows = self.layer != Layer.KERNELS and self.differs(Layer.COLLECTIVES)
        return Divergence(
            layer=self.layer,
            cls=DivergenceClass.COLLECTIVES if found.hangs or follows else DivergenceClass.CONTENT,
            domain=self.whole.domain.name,
            where=self._where(),
            groups=self.whole.sides(groups, row, found.cause),
            title=found.headline or headline(row, groups),
            cause=found.cause,
            guard=failed,
            held=held,
            step=self.whole.slot.step,
            is_rank_known=0 < len(found.guilty) < len(groups),
            advice=found.cause.advice,
            consequences=tuple(layer for layer in self.whole.layers if layer != self.layer),
        )

    def _shown(self, found: Explanation) -> tuple[list[int], Groups]:
        """Groups to show: those that evidence names last, and one for all ranks that run the same program.

        Each rank may have a guard of its own on its rank, and one of them alone a different program.
        """
        programs = self._programs() if found.directness == Directness.VALUE else ()
        if len(programs) > 1:
            index_of = {ranks[0]: index for index, ranks in enumerate(self.groups)}
            return [index_of[ranks[0]] for ranks in programs], programs
        order = sorted(range(len(self.groups)), key=lambda index: index in found.guilty)
        return order, tuple(self.groups[index] for index in order)

    def _programs(self) -> Groups:
        """Ranks by program, where each program is that of one or several groups; else nothing."""
        programs = self.whole.slot.groups(Layer.GRAPH)
        firsts = {ranks[0] for ranks in self.groups}
        is_split = all(any(set(ranks) <= set(own) for own in programs) for ranks in self.groups)
        return programs if is_split and firsts.issuperset(own[0] for own in programs) else ()

    def _listed(self, row: Row, cls: DivergenceClass, title: str, reason: str = "") -> Divergence:
        cause = Cause.RANK_PARAMETRIC if cls == DivergenceClass.RANK_PARAMETRIC else Cause.UNKNOWN
        return Divergence(
            layer=self.layer,
            cls=cls,
            domain=self.whole.domain.name,
            where=self._where(),
            groups=self.whole.sides(self.groups, row, cause),
            title=title,
            cause=cause,
            step=self.whole.slot.step,
            advice=f"declared: {reason}" if reason else cause.advice,
        )

    def _where(self) -> str:
        where, part = self.whole.slot.where, self.key[1]
        return f"{where} ({part})" if part else where


def _both_sides(guard: Row, order: Sequence[int]) -> tuple[str, str]:
    """What the guard says on the first side and on the last; nothing unless all have it."""
    if not guard or not guard.is_full:
        return "", ""
    says = [item.says for item in guard.picked(order).present]
    return says[0], says[-1]
