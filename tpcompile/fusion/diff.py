"""Two manifests -> what is launched differently, and of which class the change is; structure first, then source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, pairwise, zip_longest

from tpcompile.errors import ConfigError
from tpcompile.evidence.records.base import Frozen
from tpcompile.fusion.manifest import total
from tpcompile.fusion.manifest_records import GraphManifest, Launch, Manifest, Role
from tpcompile.fusion.why_not import Missed, missed_fusions


class Change(StrEnum):
    """Class of a difference; the first that applies."""

    NONE = "none"
    OVERHEAD = "overhead"
    """More graphs: graph breaks or recompiles."""
    FUSION = "fusion"
    """More kernels, or the same number of different ones."""
    CHOICE = "kernel choice"
    """A library call on one side is a template on the other: autotuning chose by timing."""
    WRAPPER = "wrapper"
    """The same kernels, and more or fewer copies and ops that the wrapper runs between them."""
    CODEGEN = "codegen"
    """The same kernels with different code: tiling, size hints."""


_BY_WEIGHT = (Change.NONE, Change.CODEGEN, Change.WRAPPER, Change.FUSION, Change.CHOICE)
"""Classes of one graph; of several graphs, the last one here is the program's."""
WORDS = {
    Change.NONE: "the same kernels with the same code",
    Change.OVERHEAD: "a graph more or less",
    Change.FUSION: "different kernels",
    Change.CHOICE: "a library call on one side is a template on the other, since autotuning chose by timing",
    Change.WRAPPER: "the same kernels, and different copies or ops that the wrapper runs between them",
    Change.CODEGEN: "the same kernels with different code",
}


class Split(Frozen):
    """A kernel of the base that is several in the new manifest."""

    was: str
    now: tuple[str, ...]
    why: tuple[Missed, ...]
    """Why neighbours among them are not one kernel; empty where that is not known."""


class GraphDiff(Frozen):
    """One graph of both; `removed` and `added` are launches by what they do, not by name."""

    graph: str
    removed: tuple[Launch, ...] = ()
    added: tuple[Launch, ...] = ()
    splits: tuple[Split, ...] = ()
    recoded: tuple[str, ...] = ()
    """Kernels that do the same with different code."""
    tuned: tuple[str, ...] = ()
    """Kernels with the same code in a different configuration, or with different registers; no difference by itself."""
    added_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """True where neither structure nor code differs."""
        return not (self.removed or self.added or self.recoded)


class Diff(Frozen):
    """Two manifests."""

    change: Change
    missing: tuple[str, ...]
    """Graphs that only the base has."""
    new: tuple[str, ...]
    """Graphs that only the new one has."""
    graphs: tuple[GraphDiff, ...]
    """Those that differ."""
    tuned: tuple[str, ...] = ()
    """Kernels of all graphs with the same code in a different configuration, which autotuning chose by timing."""


def diff(base: Manifest, new: Manifest, *, across_versions: bool = False) -> Diff:
    """Compare graph by graph, in order of phase and compile.

    Raises ConfigError for manifests of different versions of torch, whose kernels differ by nature, unless
    `across_versions`, and for manifests of different devices.
    """
    if base.device != new.device:
        raise ConfigError(
            f"the base was recorded for {base.device}, the new manifest for {new.device}: their kernels cannot be "
            "compared. Record both for one device"
        )
    if base.torch != new.torch and not across_versions:
        raise ConfigError(
            f"the base was recorded with torch {base.torch}, the new manifest with {new.torch}: kernels differ by "
            "nature. Record the base again, or pass --across-versions"
        )
    missing, added, found = [], [], []
    for before, after in zip_longest(base.graphs, new.graphs):
        if after is None:
            missing.append(_name(before))
        elif before is None:
            added.append(_name(after))
        else:
            found.append(graph_diff(before, after, new.settings))
    differing = tuple(one for one in found if not one.is_empty)
    classes = map(_class_of_graph, differing)
    return Diff(
        change=Change.OVERHEAD if missing or added else max(classes, key=_BY_WEIGHT.index, default=Change.NONE),
        missing=tuple(missing),
        new=tuple(added),
        graphs=differing,
        tuned=tuple(chain.from_iterable(one.tuned for one in found)),
    )


def graph_diff(base: GraphManifest, new: GraphManifest, settings: Mapping[str, str]) -> GraphDiff:
    """What one of two graphs launches and the other does not; `settings` are those of the new one."""
    before, after = _by_structure(base.launches), _by_structure(new.launches)
    removed = list(_surplus(before, after))
    added = list(_surplus(after, before))
    return GraphDiff(
        graph=_name(base),
        removed=tuple(removed),
        added=tuple(added),
        splits=tuple(_splits(removed, added, new, settings)),
        recoded=tuple(_recoded(before, after)),
        tuned=tuple(_tuned(before, after)),
        added_bytes=total(new.launches).bytes - total(base.launches).bytes,
    )


def _name(graph: GraphManifest) -> str:
    return f"{graph.compile_id or '-'} {graph.phase}"


# By what a launch does: names and their numbers say nothing, and ranks that do the same have them in common anyway.

_ByStructure = dict[tuple[object, ...], list[Launch]]


def _by_structure(launches: Iterable[Launch]) -> _ByStructure:
    found: _ByStructure = defaultdict(list)
    for launch in launches:
        name = "" if launch.role is Role.KERNEL else launch.name
        body = tuple(launch.body.items())
        found[launch.role, launch.kind, name, launch.ops, launch.loops, body].append(launch)
    return found


def _surplus(ours: _ByStructure, theirs: _ByStructure) -> Iterator[Launch]:
    """Launches of which there are more here."""
    for structure, launches in ours.items():
        yield from launches[len(theirs.get(structure, ())) :]


def _recoded(before: _ByStructure, after: _ByStructure) -> Iterator[str]:
    for structure, launches in before.items():
        others = after.get(structure, [])
        sources = Counter(one.source for one in launches)
        other_sources = Counter(one.source for one in others)
        is_in_both = bool(others)
        if is_in_both and sources != other_sources:
            yield launches[0].name


def _tuned(before: _ByStructure, after: _ByStructure) -> Iterator[str]:
    """`triton_poi_fused_add_0: XBLOCK=512, 15 registers -> XBLOCK=1024, 23 registers`, where both are known."""
    for structure, launches in before.items():
        others = after.get(structure, [])
        for one, other in zip(launches, others, strict=False):
            has_same_code = one.source == other.source
            is_known = bool(one.resources) and bool(other.resources)
            is_tuned = has_same_code and one.resources != other.resources
            if is_known and is_tuned:
                needs = (
                    "; ".join(f"{each.configuration}, {each.registers} registers" for each in launch.resources)
                    for launch in (one, other)
                )
                yield f"{one.name}: {' -> '.join(needs)}"


def _splits(
    removed: Iterable[Launch], added: Sequence[Launch], new: GraphManifest, settings: Mapping[str, str]
) -> Iterator[Split]:
    """Kernels whose nodes are in several kernels now, and why neighbours among those are apart."""
    for launch in removed:
        now = [one for one in added if set(one.fx) & set(launch.fx)]
        is_split = len(now) > 1
        if launch.role is Role.KERNEL and is_split:
            places = sorted(map(new.launches.index, now))
            neighbours = set(pairwise(places))
            why = filter(lambda missed: missed.places in neighbours, missed_fusions(new, settings))
            names = [one.name for one in now]
            yield Split(was=launch.name, now=tuple(names), why=tuple(why))


# Classes


def _class_of_graph(one: GraphDiff) -> Change:
    differing = [*one.removed, *one.added]
    if not differing:
        return Change.CODEGEN
    if _is_choice(one.removed, one.added) or _is_choice(one.added, one.removed):
        return Change.CHOICE
    roles = {launch.role for launch in differing}
    is_of_the_wrapper = roles <= {Role.COPY, Role.WRAPPER}
    return Change.WRAPPER if is_of_the_wrapper else Change.FUSION


def _is_choice(side: Iterable[Launch], other: Iterable[Launch]) -> bool:
    """True where a matmul is a library call on one side and a template on the other."""
    is_library = any(launch.role is Role.EXTERN for launch in side)
    return is_library and any(launch.kind == "tem" and launch.role is not Role.EXTERN for launch in other)
