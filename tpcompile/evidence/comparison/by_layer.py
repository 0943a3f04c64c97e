"""One compile that all ranks made -> its listed differences, and the one finding that explains the others."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tpcompile.evidence.comparison.blamed import rank_group
from tpcompile.evidence.groups.align import Slot
from tpcompile.evidence.groups.by_group import ByGroup, Items, Row
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.groups.domain import Domain
from tpcompile.evidence.iterables import find, first, grouped
from tpcompile.evidence.layers import SPECS
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.layers.kernels import LAUNCHES, is_reordered
from tpcompile.evidence.layers.parted_stacks import at_parting
from tpcompile.evidence.layers.row_text import headline
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, Followed
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    ItemKind,
    Layer,
    LayerDigest,
    RankGroup,
    RankRead,
    value_item,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks

Key = tuple[Layer, str]
"""A layer and the part of it."""
_REACHED = {
    Layer.COLLECTIVES: "the Dynamo graph",
    Layer.LOWERED: "lowered graphs",
    Layer.KERNELS: "generated code",
}
"""The last layer of a compile -> how far it was lowered."""


def environment(domain: Domain) -> list[Divergence]:
    """What differs between the environments of the ranks: each in the form of a compile, its items under index -1."""
    compiles: dict[int, CompileDigest] = {}
    for rank, digest in domain.digests.items():
        layer = LayerDigest(layer=Layer.ENVIRONMENT, sha256=digest.environment, num_items=0)
        compiles[rank] = CompileDigest(index=-1, compile_id="", phase="", frame="", layers=(layer,))
    return of_slot(domain, Slot("", "", compiles))


def of_slot(domain: Domain, slot: Slot) -> list[Divergence]:
    """What differs in one compile."""
    return _Compile(domain, slot).findings()


class _Compile:
    """One compile as all ranks saw it."""

    def __init__(self, domain: Domain, slot: Slot) -> None:
        self.domain = domain
        self.slot = slot
        differing = [_Layer(self, key, slot.groups(*key)) for key in slot.differing]
        self.differing = sorted(differing, key=lambda layer: layer.place)
        """Layers and parts that differ, from cause to effect."""
        names = [layer.layer for layer in self.differing]
        self.layers = list(dict.fromkeys(names))

    def findings(self) -> list[Divergence]:
        """What is listed in the user's program, then the finding of the layer that explains the rest, or else what
        differs in the lowered layers."""
        found: list[Divergence] = []
        strict: list[_Layer] = []
        for layer in self.differing:
            if layer.spec.is_strict:
                strict.append(layer)
                found += layer.listed
        red = [layer for layer in strict if layer.is_red]
        return found + (self.explained_by(red) if red else self.below(strict))

    def explained_by(self, red: Sequence[_Layer]) -> list[Divergence]:
        """The finding of the layer that names most directly what happened; the others are its consequences."""
        layer = min(red, key=lambda layer: layer.explanation.directness)
        if layer.layer == Layer.COLLECTIVES:
            # A backend that does not lower leaves the collectives of the Dynamo graph, worded differently.
            backends = self.backends()
            if backends:
                return backends
        finding = layer.red()
        raised = first(filter(None, (layer.explanation.raised for layer in red)))
        if raised is None or finding.cause == Cause.COMPILE_FAILED:
            return [finding]
        # The different program failed in the backend.
        return [finding.model_copy(update={"title": f"{finding.title}; {raised}"})]

    def lowered(self, strict: Iterable[_Layer]) -> list[Divergence]:
        """What differs in the lowered layers of equal programs.

        A declared input or constant is also in the lowered graph, and in the code made from that graph; a declared
        guard is not. Shards of different sizes have different shapes all the way down. A matmul padded in the forward
        is padded in the backward. None of these explains collectives in a different order. None of
        this is known where a log ended before the guards of the compile.
        """
        unguarded = self.slot.compiles.where(lambda compile_: compile_.sha(Layer.GUARDS) is None)
        if unguarded and self.domain.is_cut:
            return []
        found: list[Divergence] = []
        is_explained = any(layer.layer != Layer.GUARDS or layer.followed.rows for layer in strict)
        for layer in self.differing:
            if layer.spec.is_strict or layer.follows(is_explained=is_explained):
                continue
            found += layer.listed
            if not layer.is_red:
                continue
            found.append(layer.red())
            is_explained = True
            if not found[-1].is_choice:
                break
        return found

    def below(self, strict: Iterable[_Layer]) -> list[Divergence]:
        """What differs below equal programs: lowered layers, or else how far they were lowered.

        Backends that lower graphs differently are named, where the ranks differ in how far they lowered as well.
        """
        lowered = self.lowered(strict)
        backends = self.backends()
        unexplained = find(lowered, lambda finding: finding.cause == Cause.COMPILER_PASS)
        if unexplained and backends:
            differing = sorted(group.ranks for group in unexplained.groups)
            by_backend = sorted(group.ranks for group in backends[0].groups)
            if differing == by_backend:
                return backends
        return lowered or backends

    def backends(self) -> list[Divergence]:
        """The finding where some ranks lowered a frame further than others.

        None for a rank that loaded it from a cache and logged no code: how far it was lowered is not known.
        """
        reached = self.slot.compiles.map(_reached)
        loaded = self.slot.compiles.where(lambda compile_: compile_.is_loaded)
        is_unknown = self.domain.is_cut or "" in reached.values()
        is_code_missing = any(reached[rank] != _REACHED[Layer.KERNELS] for rank in loaded)
        if is_unknown or is_code_missing or not reached.differ():
            return []
        groups = reached.groups()
        row = Row(value_item("torch.compile lowered to", text) for _, text in reached.sides())
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
        """Groups with their items, and the line of the frame."""
        leaders = self.domain.leaders(self.slot.compiles, groups)
        columns = zip(groups, row, leaders, strict=True)
        return tuple(rank_group(ranks, item, seen.compile, cause) for ranks, item, seen in columns)


def _reached(compile_: CompileDigest) -> str:
    """How far a compile was lowered; empty for a frame without a graph."""
    layers = {digest.layer for digest in compile_.layers}
    has_graph = layers.issuperset({Layer.GUARDS, Layer.COLLECTIVES})
    if not has_graph:
        return ""
    order = list(_REACHED)
    furthest = max(layers & _REACHED.keys(), key=order.index)
    return _REACHED[furthest]


class _Layer:
    """One layer in which groups of ranks differ; an explanation asks it about the compile."""

    def __init__(self, whole: _Compile, key: Key, groups: Groups) -> None:
        self.whole, self.key, self.groups = whole, key, groups
        self.layer, part = key
        self.spec = SPECS[self.layer]
        self.phase = part.removesuffix(LAUNCHES)
        """`forward` or `backward`; empty for a layer of one part."""
        is_code = key == (Layer.KERNELS, self.phase)
        self.place = (list(SPECS).index(self.layer), self.phase != "forward", is_code)
        """Key that sorts from cause to effect: layers in order, forward before backward, launches before their code."""
        self._seen = whole.domain.leaders(whole.slot.compiles, groups)

    def follows(self, *, is_explained: bool) -> bool:
        """True for what is made from a layer above that differs, or that is explained: a lowered graph, launches, code.

        Code that issues its collectives in a different order under equal graphs follows from nothing.
        """
        if self.layer != Layer.KERNELS:
            return is_explained
        # Where a difference of collectives is declared, the code follows from it.
        is_declared = self.differs(Layer.COLLECTIVES)
        if not is_declared and is_reordered(self._own_items):
            return False
        above = {(Layer.LOWERED, self.phase), (Layer.KERNELS, f"{self.phase}{LAUNCHES}")}
        differing = above.intersection(self.whole.slot.differing)
        is_made_from_above = bool(differing - {self.key})
        return is_explained or is_made_from_above

    @property
    def is_red(self) -> bool:
        """True when a difference is left that is not declared."""
        return bool(self.difference.rows)

    @functools.cached_property
    def _own_items(self) -> Items:
        return Items(seen.items(*self.key) for seen in self._seen)

    @functools.cached_property
    def _silent(self) -> tuple[int, ...]:
        """Ranks that have items of the layer which did not come."""
        came = zip(self.groups, self._seen, self._own_items, strict=True)
        silent = [ranks for ranks, seen, items in came if not items and seen.compile.num_items(*self.key)]
        return tuple(sorted(itertools.chain.from_iterable(silent)))

    @functools.cached_property
    def followed(self) -> Followed:
        """Rows that follow the rank's coordinate, apart from the others."""
        rows = rows_of(self._own_items, is_ordered=self.spec.is_ordered)
        return self.spec.follow(Difference(self.groups, self._own_items, rows, self))

    @functools.cached_property
    def _by_reason(self) -> dict[str, list[Row]]:
        """Reason from the allow-list -> the other rows; under "" those that are not declared."""
        return grouped(self.followed.left, lambda row: self.whole.domain.reason(self.layer, row))

    @functools.cached_property
    def listed(self) -> list[Divergence]:
        """One divergence for the rows that follow the rank's coordinate, and one for the first declared row."""
        found: list[Divergence] = []
        followed = self.followed
        if followed.rows:
            cause = Cause.RANK_PARAMETRIC
            fields = {"cls": DivergenceClass.RANK_PARAMETRIC, "title": followed.says, "advice": cause.note}
            found.append(self._divergence(cause, self.groups, followed.rows[0], **fields))
        reason = find(self._by_reason, bool)
        if reason:
            row = self._by_reason[reason][0]
            title, advice = headline(row, self.groups), f"declared: {reason}"
            fields = {"cls": DivergenceClass.DECLARED, "title": title, "advice": advice}
            found.append(self._divergence(Cause.UNKNOWN, self.groups, row, **fields))
        return found

    @functools.cached_property
    def difference(self) -> Difference:
        """The rows that are neither rank-parametric nor declared."""
        return Difference(self.groups, self._own_items, tuple(self._by_reason.get("", [])), self)

    @functools.cached_property
    def explanation(self) -> Explanation:
        """Why it differs; a rank that has ended may have sent the hash of its items, and not the items."""
        if not self._silent:
            return self.spec.explain(self.difference)
        says = f"{self.layer}: {named_ranks(self._silent)} sent other hashes than the rest, and not what is behind them"
        return Explanation(Cause.UNKNOWN, Directness.ONE_SIDED, Row([None] * len(self.groups)), headline=says)

    # What an explanation may ask of the compile.

    def items(self, layer: Layer, part: str = "") -> Items:
        """Items of a different layer, for the groups of this one; none where that layer was not observed."""
        is_known = all(seen.compile.sha(layer, part) for seen in self._seen)
        return Items(seen.items(layer, part) if is_known else () for seen in self._seen)

    def differs(self, layer: Layer) -> bool:
        """True when the hashes of that layer differ."""
        return layer in self.whole.layers

    def is_symbolic(self) -> ByGroup[bool]:
        """True for each group of ranks in whose compile any size is symbolic."""
        return self._seen.map(lambda seen: seen.compile.is_dynamic)

    def coordinates(self) -> Groups:
        """Places of the ranks in the domain, for each group."""
        return tuple(map(self.whole.domain.coordinates, self.groups))

    def rank_reads(self) -> Sequence[RankRead]:
        """Sure reads of the rank in the traced code of this frame."""
        sources = itertools.chain.from_iterable(digest.rank_sources("read") for digest in self.whole.domain.ranks)
        reads = [read for read in sources if read.is_sure]
        return [read for read in reads if read.where.endswith(self.whole.slot.frame)]

    # Findings.

    def red(self) -> Divergence:
        """The finding; the ranks that the evidence names come last."""
        found = self.explanation
        order, groups = self._shown(found)
        # Collectives that differ may explain the program.
        is_collective = bool(found.row.present) and found.row.first.kind == ItemKind.COLLECTIVE
        items = self.items(Layer.COLLECTIVES) if is_collective else self._own_items
        row = at_parting(found.row, items, found.cause).picked(order)
        held, failed = _both_sides(found.guard, order)
        # For generated code the calls in it decide whether the ranks will wait for each other.
        follows = self.layer != Layer.KERNELS and self.differs(Layer.COLLECTIVES)
        hangs = found.hangs or follows
        return self._divergence(
            found.cause,
            groups,
            row,
            cls=DivergenceClass.COLLECTIVES if hangs else DivergenceClass.CONTENT,
            title=found.headline or headline(row, groups),
            guard=failed,
            held=held,
            is_rank_known=0 < len(found.guilty) < len(groups),
            advice=found.cause.advice,
            consequences=tuple(layer for layer in self.whole.layers if layer != self.layer),
        )

    def _shown(self, found: Explanation) -> tuple[list[int], Groups]:
        """Order of the groups, and their ranks: the ranks at fault last, ranks with the same program in one group.

        Every rank may have a guard of its own on its rank, while only one of them has a different program.
        """
        is_value = found.directness == Directness.VALUE
        programs = self._programs() if is_value else ()
        if len(programs) > 1:
            index_of = {ranks[0]: index for index, ranks in enumerate(self.groups)}
            order = [index_of[ranks[0]] for ranks in programs]
            return order, programs
        order = sorted(range(len(self.groups)), key=lambda index: index in found.guilty)
        return order, ByGroup(self.groups).picked(order)

    def _programs(self) -> Groups:
        """Groups of ranks with equal programs; empty if the ranks of any group have different programs."""
        ranks = itertools.chain.from_iterable(self.groups)
        programs = self.whole.slot.compiles.among(ranks).map(lambda compile_: compile_.sha(Layer.GRAPH))
        is_split = any(programs.among(group).differ() for group in self.groups)
        return () if is_split else programs.groups()

    def _divergence(self, cause: Cause, groups: Groups, row: Row, **fields: Any) -> Divergence:
        where, part = self.whole.slot.where, self.key[1]
        return Divergence(
            layer=self.layer,
            cause=cause,
            domain=self.whole.domain.name,
            where=f"{where} ({part})" if part else where,
            groups=self.whole.sides(groups, row, cause),
            step=self.whole.slot.step,
            **fields,
        )


def _both_sides(guard: Row, order: Sequence[int]) -> tuple[str, str]:
    """The guard of the first group and of the last; empty unless all groups have it."""
    if not guard or not guard.is_full:
        return "", ""
    shown = guard.picked(order).present
    return shown[0].says, shown[-1].says
