"""`RankRecord` -> layers of canonical items -> `RankDigest`.

An item is one line of canonical text. The digest of a layer is the hash of its items; when digests differ, the
items are what is shown, so nothing can be hashed that cannot be explained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from tpcompile.evidence import codetext, normalise
from tpcompile.evidence.collectives import blamed_line
from tpcompile.evidence.lines import innermost_own, is_library
from tpcompile.evidence.reasontext import nearest_reason
from tpcompile.evidence.recompiles import recompiles_of
from tpcompile.evidence.records import (
    Collective,
    CompileDigest,
    CompileRecord,
    Graph,
    Guard,
    InputTensor,
    Item,
    Kernel,
    Layer,
    LayerDigest,
    Node,
    RankDigest,
    RankRead,
    RankRecord,
    UserLine,
)
from tpcompile.evidence.splits import splits_of
from tpcompile.evidence.suspects import suspects_of

LOWERED_PART = {"forward": "forward", "inference": "forward", "backward": "backward"}
UNORDERED = frozenset({Layer.ENVIRONMENT, Layer.INPUTS, Layer.GUARDS})
"""Layers that are sets: their items are sorted, and compared by membership instead of position."""
SEPARATOR = " :: "
"""Between what an item is about and what it says; two ranks' items about the same thing share the first half."""
UNUSED = "result is dropped"
"""`raw` of a collective whose result nobody reads."""


def digest_rank(record: RankRecord) -> RankDigest:
    """Hash everything one rank knows: what travels between ranks."""
    return RankDigest(
        rank=record.rank,
        domain=record.domain,
        coordinate=record.coordinate,
        environment=_sha(environment_items(record)),
        compiles=tuple(digest_compile(compile_, index) for index, compile_ in enumerate(record.compiles)),
        counters=record.counters,
        is_cut=record.is_cut or any(c.is_cut for c in record.compiles),
        splits=splits_of(record),
        regions_counted=sum(count.calls for count in record.regions),
        breaks=tuple((c.phase, b) for c in record.compiles for b in c.breaks),
        recompile_reasons=tuple(
            (c.phase, nearest_reason(c.recompile_reasons)) for c in record.compiles if c.recompile_reasons
        ),
        recompiles=tuple(r for c in record.compiles for r in recompiles_of(c, frame=frame_name(c))),
        places=record.places,
        suspects=_suspects(record),
        is_code_seen=any(c.rank_reads is not None for c in record.compiles),
        undeclared_ops=record.undeclared_ops,
        overwritten=tuple(item for compile_ in record.compiles for item in overwritten_items(compile_)),
        facts=record.facts,
    )


def _suspects(record: RankRecord) -> tuple[RankRead, ...]:
    """What looks rank-dependent, each line once."""
    places = ((c, f"{c.phase}, {frame_name(c)}" if c.phase else frame_name(c)) for c in record.compiles)
    found = [suspect for c, where in places for suspect in suspects_of(c, where=where)]
    # The surest of a line is kept: one trace may have passed it by, another not.
    found.sort(key=lambda s: (s.is_sure, not s.receiver))
    return tuple({(s.what, s.text, s.line): s for s in found}.values())


def overwritten_items(compile_: CompileRecord) -> tuple[Item, ...]:
    """One item per all-reduce of the generated code that destroys numbers which are read afterwards."""
    items = []
    for wrapper in (k for k in compile_.kernels if k.kind == "call"):
        issued = [c for c in compile_.collectives if (c.phase, c.op) == (wrapper.phase, "all_reduce")]
        for number in codetext.overwritten_reads(wrapper.code):
            line = issued[number].line if number < len(issued) else None
            items.append(Item(text=f"{wrapper.phase} all-reduce #{number} of {frame_name(compile_)}", line=line))
    return tuple(items)


def digest_compile(compile_: CompileRecord, index: int) -> CompileDigest:
    """Hash every observed layer of one compile."""
    layers = [
        LayerDigest(layer=layer, part=part, sha256=_sha(items), num_items=len(items))
        for layer, part in observed_layers(compile_)
        for items in [layer_items(compile_, layer, part)]
    ]
    return CompileDigest(
        index=index,
        compile_id=compile_.compile_id,
        phase=compile_.phase,
        frame=frame_name(compile_),
        step=compile_.step,
        line=own_line(compile_),
        recompile_reason=nearest_reason(compile_.recompile_reasons),
        limit_reached=compile_.limit_reached,
        is_dynamic=_is_dynamic(compile_),
        cache=tuple(dict.fromkeys(compile_.cache)),
        normalised=compile_.normalised,
        layers=tuple(layers),
    )


def _is_dynamic(compile_: CompileRecord) -> bool:
    inputs = (n for g in compile_.graphs if g.kind == "dynamo" for n in g.nodes if n.op == "placeholder")
    return any("#" in node.value for node in inputs)


def frame_name(compile_: CompileRecord) -> str:
    """`function file:line` of the compiled frame, with the path shortened so that machines agree."""
    if compile_.line is None:
        return compile_.function or "?"
    return f"{compile_.function} {normalise.short_path(compile_.line.file)}:{compile_.line.line}"


def own_line(compile_: CompileRecord) -> UserLine | None:
    """The user's line of the compiled frame: of a frame of torch's own, a wrapped `nn.Sequential`, who called it."""
    if compile_.line is None or not is_library(compile_.line):
        return compile_.line
    return innermost_own(compile_.stack) or compile_.line


def observed_layers(compile_: CompileRecord) -> Iterator[tuple[Layer, str]]:
    """(layer, part) pairs there is evidence for, from cause to effect; the rest is *not observed*."""
    if compile_.inputs:
        yield Layer.INPUTS, ""
    # A frame without a graph is evidence too, this rank compiled nothing of it; unless its log ends before.
    if compile_.graphs or not compile_.is_cut:
        yield Layer.GRAPH, ""
    if compile_.guards:
        yield Layer.GUARDS, ""
    lowered = {LOWERED_PART[g.kind] for g in compile_.graphs if g.kind in LOWERED_PART}
    # The collectives of a Dynamo graph are not worded as those of the lowered graphs that another rank has.
    lost = compile_.is_cut or any(event.endswith("_hit") for event in compile_.cache)
    if compile_.graphs and (lowered or not lost) and not (compile_.is_cut and not compile_.guards):
        yield Layer.COLLECTIVES, ""
    kernels = {k.phase for k in compile_.kernels}
    for layer, parts in ((Layer.LOWERED, lowered), (Layer.KERNELS, kernels)):
        for part in ("forward", "backward"):
            if part in parts:
                yield layer, part


def layer_items(compile_: CompileRecord, layer: Layer, part: str = "") -> tuple[Item, ...]:
    """Canonical items of one layer of one compile."""
    match layer:
        case Layer.INPUTS:
            items: Iterable[Item] = (_input_item(tensor) for tensor in compile_.inputs)
        case Layer.GRAPH:
            items = _program_items(compile_)
        case Layer.GUARDS:
            items = (_guard_item(guard) for guard in compile_.guards)
        case Layer.COLLECTIVES:
            items = (_collective_item(collective) for collective in compile_.collectives)
        case Layer.LOWERED:
            items = (item for g in compile_.graphs if LOWERED_PART.get(g.kind) == part for item in graph_items(g))
        case Layer.KERNELS:
            items = (item for k in compile_.kernels if k.phase == part for item in _kernel_items(k))
        case Layer.ENVIRONMENT:
            raise AssertionError("the environment belongs to the rank; use environment_items")
    if layer in UNORDERED:
        return tuple(sorted(_unique(items), key=lambda item: item.text))
    return tuple(items)


def environment_items(record: RankRecord) -> tuple[Item, ...]:
    """Canonical items of the environment layer of a rank."""
    return tuple(Item(text=f"{key}{SEPARATOR}{value}") for key, value in sorted(record.environment))


def _unique(items: Iterable[Item]) -> Iterable[Item]:
    return {item.text: item for item in items}.values()


def _input_item(tensor: InputTensor) -> Item:
    says = (
        f"dtype={tensor.dtype} shape={tensor.shape} stride={tensor.stride} device={tensor.device} "
        f"requires_grad={tensor.requires_grad} dynamic={tensor.dynamic or 'none'}"
    )
    return Item(text=f"{tensor.source}{SEPARATOR}{says}")


def _program_items(compile_: CompileRecord) -> Iterator[Item]:
    for graph in compile_.graphs:
        if graph.kind == "dynamo":
            yield from graph_items(graph)
    for found in compile_.breaks:
        where = f"{normalise.short_path(found.line.file)}:{found.line.line}" if found.line else "?"
        yield Item(text=f"graph break at {where}{SEPARATOR}{found.reason}", line=found.line)
    if compile_.failure:
        yield Item(text=f"compile failed{SEPARATOR}{compile_.failure}", line=compile_.failure_line or compile_.line)


def graph_items(graph: Graph) -> Iterator[Item]:
    """Items of one FX graph, a node each, in order."""
    by_scope: dict[str, list[Node]] = {}
    for node in graph.nodes:
        nodes = by_scope.setdefault(node.scope, [])
        nodes.append(node)
    for nodes in by_scope.values():
        for index, node in enumerate(nodes):
            yield Item(text=node_text(node, index), line=blamed_line(nodes, index), raw=node.name)


def node_text(node: Node, index: int) -> str:
    """`scope%index = target(args) -> value`: everything of a node that counts."""
    args = ", ".join([*node.args, *(f"{key}={value}" for key, value in node.kwargs)])
    return f"{node.scope}%{index}{SEPARATOR}{node.op} {node.target}({args}) -> {node.value}"


def _guard_item(guard: Guard) -> Item:
    # By source, so that TRUE_MATCH here and FALSE_MATCH there are one difference.
    about = guard.source or guard.type
    # Nobody can change a line of torch; the line of the compiled frame says more.
    line = guard.line if guard.line and not is_library(guard.line) else None
    return Item(text=f"{about}{SEPARATOR}{guard.type}: {guard.expression}", line=line)


def _collective_item(collective: Collective) -> Item:
    says = (
        f"{collective.op}(reduce_op={collective.reduce_op or '-'}, dtype={collective.dtype}, shape={collective.shape}, "
        f"group={collective.group}, waited={collective.waited})"
    )
    # A dropped result is another edge of the graph; the schedule of collectives is the same.
    raw = "" if collective.used else UNUSED
    return Item(text=f"{collective.phase}{SEPARATOR}{says}", line=collective.line, raw=raw)


def _kernel_items(kernel: Kernel) -> Iterator[Item]:
    return (Item(text=f"{kernel.name}{SEPARATOR}{line}") for line in kernel.code.splitlines())


def _sha(items: Iterable[Item]) -> str:
    hasher = hashlib.sha256()
    for item in items:
        data = item.text.encode()
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()
