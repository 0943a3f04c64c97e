"""Manifest of a graph -> its pairs of launches that share a buffer: why they are two, what one would save."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, combinations

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import Frozen
from tpcompile.fusion.kinds import Kind, kind_of
from tpcompile.fusion.manifest_records import Decisions, GraphManifest, Launch, Pair, Role
from tpcompile.fusion.reasons import DIFFERENT_ORDER, NOTHING_SHARED, TWO_ORDERS, Boundary, Reason, reason_of

_NAMESPACE = re.compile(r"torch\.ops\.(?P<name>\w+)")
_OF_TORCH = frozenset({"aten", "prims", "inductor", "mkldnn", "mkl", "onednn", "quantized", "rngprims", "symm_mem"})
"""Namespaces of torch's own ops."""
_MATMULS = ("mm", "addmm", "bmm", "baddbmm")
_BETWEEN = "intermediate nodes between node1 & node2"


class Missed(Frozen):
    """Two launches that share buffers and are not one."""

    first: str
    second: str
    """Names of the launches; equal names are different launches of one kernel."""
    places: tuple[int, int]
    """Their places among the launches of the graph."""
    shared: tuple[str, ...]
    """Buffers."""
    saved_bytes: int
    """That one kernel would not have to read or write."""
    reason: Reason
    logged: tuple[str, ...]
    """Inductor's own words; empty where it was silent."""
    score: dict[str, int] | None
    between: tuple[str, ...] = ()
    """Launches that must run between them, without waits."""
    lines: tuple[UserLine, ...]
    """The user's lines of both."""


def missed_fusions(found: GraphManifest, settings: Mapping[str, str] | None = None) -> tuple[Missed, ...]:
    """All missed fusions by what they would save, the most first. Empty where the manifest is not aligned.

    With the settings of the manifest, a remedy that is in use already is not proposed again.
    """
    if found.decisions is None or not found.is_aligned:
        return ()
    graph = found.model_copy(update={"launches": _without_waits(found.launches)})
    looked_at = _looked_at(graph.launches, found.decisions)
    missed = [_missed(graph, places, looked_at, settings or {}) for places in _sharing(graph.launches)]
    return tuple(sorted(missed, key=lambda one: (-one.saved_bytes, one.places)))


def _without_waits(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """Behind a wait, the result of a collective has a new name: here it keeps that of the collective's output."""
    outputs: set[str] = set()
    kept: dict[str, str] = {}
    for launch in launches:
        if launch.role is Role.COLLECTIVE:
            outputs.update(launch.writes)
        waited_for = sorted(outputs & launch.reads.keys())
        if launch.role is Role.WAIT and waited_for:
            kept |= dict.fromkeys(launch.writes, waited_for[0])
    renamed = []
    for launch in launches:
        reads = {kept.get(name, name): size for name, size in launch.reads.items()}
        writes = {kept.get(name, name): size for name, size in launch.writes.items()}
        renamed.append(launch.model_copy(update={"reads": reads, "writes": writes}))
    return tuple(renamed)


def _sharing(launches: Sequence[Launch]) -> Iterator[tuple[int, int]]:
    """Places of launches that use one buffer, of which both work on data; neighbours in time come first."""
    working = [(at, one) for at, one in enumerate(launches) if one.role is not Role.WAIT]
    for (at, one), (then, other) in combinations(working, 2):
        if _buffers(one) & _buffers(other):
            yield at, then


def _buffers(launch: Launch) -> set[str]:
    return launch.reads.keys() | launch.writes.keys()


def _looked_at(launches: Sequence[Launch], decisions: Decisions) -> dict[tuple[int, int], list[Pair]]:
    """Places of two launches -> the pairs of their parts that the scheduler looked at."""
    place_of = {part: at for at, launch in enumerate(launches) for part in launch.parts}
    found: dict[tuple[int, int], list[Pair]] = defaultdict(list)
    for pair in decisions.pairs:
        # Places of the launches that the parts of a node, `op1_op4`, are in.
        first_places, second_places = (
            {place_of[part] for part in name.split("_") if part in place_of} for name in (pair.first, pair.second)
        )
        both = sorted(first_places | second_places)
        are_two_launches = len(first_places) == len(second_places) == 1 and len(both) == 2
        if are_two_launches:
            found[both[0], both[1]].append(pair)
    return found


def _missed(
    graph: GraphManifest,
    places: tuple[int, int],
    looked_at: Mapping[tuple[int, int], list[Pair]],
    settings: Mapping[str, str],
) -> Missed:
    both = [graph.launches[at] for at in places]
    pairs = looked_at.get(places, [])
    texts = chain.from_iterable(pair.refused for pair in pairs)
    logged = tuple(dict.fromkeys(texts))
    lines = chain.from_iterable(one.lines for one in both)
    between = _between(graph.launches, places) if _BETWEEN in logged else []
    reason = reason_of_exchange(both, settings) or _reason(graph, both, between, pairs, logged)
    setting, _, _ = reason.remedy.partition(" ")
    if settings.get(f"_inductor.{setting}") == "True":  # it is on already
        reason = reason.model_copy(update={"remedy": ""})
    return Missed(
        first=both[0].name,
        second=both[1].name,
        places=places,
        shared=tuple(sorted(set.intersection(*map(_buffers, both)))),
        saved_bytes=0 if reason.saves_nothing else _saved(graph, places),
        reason=reason,
        logged=logged,
        score=first(pair.score for pair in pairs if pair.score),
        between=tuple(one.name for one in between),
        lines=tuple(dict.fromkeys(lines)),
    )


def _saved(graph: GraphManifest, places: tuple[int, int]) -> int:
    """Reads of the second that the first has at hand; and writes that nothing else reads."""
    one = graph.launches[places[0]]
    other = graph.launches[places[1]]
    at_hand = other.reads.keys() & _buffers(one)
    # What the graph returns or a different launch reads; a wait moves nothing.
    needed_elsewhere: set[str] = set()
    if graph.decisions is not None:
        needed_elsewhere.update(graph.decisions.outputs)
    for at, launch in enumerate(graph.launches):
        if launch.role is not Role.WAIT and at not in places:
            needed_elsewhere.update(launch.reads)
    read_only_there = one.writes.keys() & other.reads.keys() - needed_elsewhere
    saved_reads = sum(other.reads[name] for name in at_hand)
    saved_writes = sum(one.writes[name] for name in read_only_there)
    return saved_reads + saved_writes


def _between(launches: Sequence[Launch], places: tuple[int, int]) -> list[Launch]:
    """Launches between two that read what the first leads to and lead to the second."""
    at, then = places
    reached = set(launches[at].writes)
    after = []
    for one in launches[at + 1 : then]:
        if reached & one.reads.keys():
            reached |= one.writes.keys()
            after.append(one)
    needed = set(launches[then].reads)
    found = []
    for one in reversed(after):
        if needed & one.writes.keys():
            needed |= one.reads.keys()
            found.append(one)
    return [one for one in reversed(found) if one.role is not Role.WAIT]


# Reasons


def _reason(
    graph: GraphManifest,
    both: Sequence[Launch],
    between: Sequence[Launch],
    pairs: Sequence[Pair],
    logged: Sequence[str],
) -> Reason:
    if all(map(_is_matmul, both)):
        is_reader = bool(both[0].writes.keys() & both[1].reads.keys())
        remedy = "" if is_reader else _SIDE_BY_SIDE
        return Reason(boundary=Boundary.EXTERN, text="two library calls", remedy=remedy)
    boundary = first(filter(None, map(_boundary_of, both)))
    if boundary is not None:
        # A template takes pointwise ops behind a matmul: no reduction, and nothing before it.
        first_one, second = both
        is_pointwise = kind_of(second) is Kind.POINTWISE or (second.kind == "cpp" and "reduction" not in second.body)
        takes_it = _is_matmul(first_one) and is_pointwise
        return boundary.model_copy(update={"remedy": _TO_TEMPLATE}) if takes_it else boundary
    if between:
        return _of_between(between)
    have_one_result = bool(set(both[0].made) & set(both[1].made))
    if have_one_result and all("reduction" in one.body for one in both):
        return _STAGES
    if logged:
        reasons = list(map(reason_of, logged))
        of_more = [reason for reason in reasons if reason.boundary is not Boundary.ORDER]
        last_one = (of_more or reasons)[-1]  # of several tries
        return _in_memory(graph, both, _by_use(graph, both, last_one))
    return _without_a_reason({pair.is_allowed for pair in pairs})


def _without_a_reason(answers: Set[bool | None]) -> Reason:
    """What refused a pair in silence; `answers` are those of the choices to its tries."""
    if True in answers:
        return Reason(
            boundary=Boundary.BACKEND,
            text="the backend refused it without a reason: the C++ backend gives none",
        )
    if False in answers:
        return Reason(
            boundary=Boundary.CHOICES,
            text="the choices handler refused it without a reason, which torch's own never does",
        )
    return Reason(
        boundary=Boundary.NOT_TRIED,
        text="the scheduler did not look at this pair: it looks at 64 neighbours of a buffer",
    )


def _by_use(graph: GraphManifest, both: Sequence[Launch], reason: Reason) -> Reason:
    """Inductor's `no shared data` is about the order, unless the two read different parts of a buffer."""
    if reason is not NOTHING_SHARED:
        return reason
    first_one, second = both
    is_reader = bool(first_one.writes.keys() & second.reads.keys())
    if is_reader:
        return DIFFERENT_ORDER
    sizes = graph.decisions.sizes.items() if graph.decisions else ()
    # Where both read all elements of a buffer, one pass in one order would read them once.
    read_whole = [name for name, size in sizes if first_one.reads.get(name) == size == second.reads.get(name)]
    found = TWO_ORDERS if read_whole else NOTHING_SHARED
    have_one_loop = first_one.loops == second.loops
    have_reductions = any(one.body.get("reduction") for one in both)
    remedy = _AGGRESSIVE if have_one_loop and not have_reductions else ""
    return found.model_copy(update={"remedy": remedy})


def _in_memory(graph: GraphManifest, both: Sequence[Launch], reason: Reason) -> Reason:
    """Add why the buffer between them was made at all, where computing it in the second would have been possible."""
    if reason.boundary is not Boundary.INDEXING or graph.decisions is None:
        return reason
    between = both[0].writes.keys() & both[1].reads.keys()
    made = first(one for one in graph.decisions.realized if one.buffer in between)
    if made is None:
        return reason
    remedy = reason.remedy
    if made.setting:
        remedy = f"config.{made.setting}, or operands in a different order"
    text = f"{reason.text}; it was made in memory because of its {made.text}"
    return Reason(boundary=reason.boundary, text=text, remedy=remedy)


def _of_between(between: Sequence[Launch]) -> Reason:
    """A collective is the boundary, or else a library call, or a kernel that could not be fused with either."""
    names = [launch.kind if launch.role is Role.COLLECTIVE else launch.name for launch in between]
    listed = [f"{number} {name}" for name, number in Counter(names).items()]
    text = f"between them run {', '.join(listed)}"
    roles = {one.role for one in between}
    boundary = Boundary.ORDER
    if Role.COLLECTIVE in roles:
        boundary = Boundary.COLLECTIVE
    elif Role.EXTERN in roles:
        boundary = Boundary.EXTERN
    return Reason(boundary=boundary, text=text)


def _boundary_of(launch: Launch) -> Reason | None:
    """Why nothing is fused into this launch; None for a generated kernel."""
    name = launch.name
    if launch.role is Role.KERNEL:
        is_users = launch.kind == "triton"
        return Reason(boundary=Boundary.TRITON, text=f"{name} is a Triton kernel of yours") if is_users else None
    if launch.role in (Role.COPY, Role.WRAPPER):
        return Reason(boundary=Boundary.DEVICE, text=f"{name} is done by the wrapper, outside of any kernel")
    namespace = _NAMESPACE.match(name)
    if namespace is None or namespace["name"] in _OF_TORCH:
        return Reason(boundary=Boundary.EXTERN, text=f"{name} is a library call")
    text = f"{name} is a custom op, which Inductor does not look into"
    return Reason(boundary=Boundary.CUSTOM, text=text, remedy="write it with torch's ops")


def _is_matmul(launch: Launch) -> bool:
    return launch.role is Role.EXTERN and launch.name.rsplit(".", 1)[-1] in _MATMULS


_TO_TEMPLATE = "config.max_autotune_gemm may make it a template, which takes the pointwise ops"
_AGGRESSIVE = "config.aggressive_fusion with config.score_fusion_memory_threshold = 0 makes one launch of them"
_SIDE_BY_SIDE = "put the operands that differ side by side, and it is one matmul (gate and up, or q, k and v)"
_STAGES = Reason(
    boundary=Boundary.STAGES,
    text="one reduction in two stages: the second reduces the partial results of the first",
    remedy="config.triton.cooperative_reductions",
)


# Exchanges

ASYNC_TP = "_inductor.config._micro_pipeline_tp"
"""The setting, as a manifest has it, by which Inductor makes one op of an exchange and a matmul."""
_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"})
_TAKEN = frozenset({"aten.mm", "aten._scaled_mm"})
"""The matmuls that torch 2.11 and 2.13 look for."""
_GATHER, _SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
_ENABLE = "torch.distributed._symmetric_memory.enable_symm_mem_for_group(group)"
_WHO_WAITS = {_GATHER: "the matmul waits for the all-gather", _SCATTER: "the reduce-scatter waits for the matmul"}
_INSTEAD = {"aten.bmm": "F.linear or x @ weight, which is an mm; then async TP (config._micro_pipeline_tp)"}


def reason_of_exchange(both: Sequence[Launch], settings: Mapping[str, str]) -> Reason | None:
    """None where neither is a collective."""
    exchanges = [one for one in both if one.role is Role.COLLECTIVE]
    if not exchanges:
        return None
    kind = _with_matmul(both)
    if kind:
        text = _WHO_WAITS[kind]
        remedy = f"async TP: config._micro_pipeline_tp, and {_ENABLE}"
        if settings.get(ASYNC_TP) == "True":
            text = f"async TP is on and did not match: {text}"
            remedy = f"{_ENABLE} before the compile"
        matmul = next(filter(None, map(_product, both)))
        if matmul not in _TAKEN:
            text += f", and async TP does not look for {matmul.removeprefix('aten.')}"
            remedy = _INSTEAD.get(matmul, "")
        return Reason(boundary=Boundary.COLLECTIVE, text=text, remedy=remedy)
    text = f"{exchanges[0].kind} is a collective: the kernels before and after it are apart"
    return Reason(boundary=Boundary.COLLECTIVE, text=text)


def _with_matmul(both: Sequence[Launch]) -> str:
    """What async TP is for: a matmul behind an all-gather, or before a reduce-scatter; empty for any other pair."""
    first, second = both
    if first.kind.startswith(_GATHER):
        return _GATHER if _product(second) else ""
    return _SCATTER if second.kind.startswith(_SCATTER) and _product(first) else ""


def _product(launch: Launch) -> str:
    """The matmul that it computes, as the graph called it; empty for none."""
    return min(_PRODUCTS & set(launch.ops), default="")
