"""Compiled code that is wrong while eager is right -> the layer of the compiler, the op, the kernel, and a repro.

All ranks run the program again, each graph beside its eager values; then a rank whose graphs are wrong searches alone
in parts of them, which have no collectives. Inductor's graphs come first: their tensors are plain, and there are
those of the backward. Then Dynamo's, for any backend. What is left are random numbers of compiled code, and stale code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import CompilerLayer, UserLine, WrongCompiled
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import innermost
from tpcompile.fusion.manifest_records import Launch, Manifest
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.numerics import repro
from tpcompile.numerics.beside_eager import Comparison, WrongGraph, first_difference, short
from tpcompile.numerics.smallest import Part, Search
from tpcompile.numerics.trace import Value
from tpcompile.numerics.traced import traced_call
from tpcompile.torch_api import comparing
from tpcompile.torch_api.comparing import Graph

_LAYERS = {
    ("eager", None): CompilerLayer.DYNAMO,
    ("aot_eager", None): CompilerLayer.AOT,
    ("aot_eager_decomp_partition", None): CompilerLayer.DECOMPOSITION,
    ("inductor", "pre_grad_passes"): CompilerLayer.PRE_GRAD,
    ("inductor", "joint_graph_passes"): CompilerLayer.JOINT,
    ("inductor", "post_grad_passes"): CompilerLayer.POST_GRAD,
    ("inductor", "lowerings"): CompilerLayer.LOWERING,
    ("inductor", None): CompilerLayer.INDUCTOR,
}
"""Backend and subsystem of torch's bisector; of others the backend alone counts."""
_OF_REPRO = {"layer", "detail", "repro", "fails_alone", "words"}
"""Fields that are known from the file and its run."""


@dataclass(frozen=True)
class Route:
    """The compiled program, as the route that found it wrong calls it."""

    call: Callable[[], Any]
    """Compiles where it must, and calls once."""
    is_right: Callable[[Any], bool]
    """True where a result is that of eager; all ranks call it alike."""
    reset: Callable[[], object]
    """Forget what was compiled."""
    all_say: Callable[[str, str], Mapping[int, str]]
    """(question, this rank's answer) -> the answers of all ranks, on all of them."""
    folder: Path | None
    """Folder in which repro.py is written; None for none."""
    timeout_s: float
    """Limit for what a rank does alone."""
    shows_names: bool = False
    """True where the folder is the run directory, of which a verdict has names."""
    rank: int = 0
    red_cpu_s: float = 0.0

    def any_says(self, question: str, answer: bool) -> bool:
        """True on all ranks where any says True."""
        return any(self.all_say(question, "yes" if answer else "").values())


def search(route: Route) -> WrongCompiled | None:
    """The finding of this rank; None where it is right here. All ranks must call it."""
    began = time.process_time()
    found = _found(route)
    if found is None:
        return None
    spent = {"search_cpu_s": round(time.process_time() - began, 2), "red_cpu_s": round(route.red_cpu_s, 2)}
    return found.model_copy(update=spent)


def _found(route: Route) -> WrongCompiled | None:
    inner = Comparison()
    with FusionRecorder() as recorder:
        _called(route, comparing.inductor_graphs(inner.on_run))
    found = _in_parts(route, inner.wrong, recorder.manifest(), name="inductor")
    if route.any_says("compiled/inductor", found is not None):
        return found
    outer = Comparison(of_dynamo=True)
    result = _called(route, comparing.dynamo_graphs(outer.on_run))
    is_traced_wrong = not route.is_right(result)  # these are the values of Dynamo's graphs in eager
    if route.any_says("compiled/dynamo", is_traced_wrong):
        other = _other_way(route, outer.graphs)
        return other if is_traced_wrong else None
    found = _in_parts(route, outer.wrong, None, name="graph")
    if route.any_says("compiled/graph", found is not None):
        return found
    return _without_graph(route, outer.graphs, is_seen=bool(outer.wrong))


@dataclass(frozen=True)
class _Eager:
    """What the program does in eager, in the files of its graphs."""

    ops: Sequence[Value]
    executed: Set[tuple[str, int]]
    """Files and lines, also those whose ops do nothing in eager."""


def _in_eager(route: Route, files: Collection[str]) -> _Eager:
    """Collective."""
    executed: set[tuple[str, int]] = set()

    def trace(frame: FrameType, _event: str, _given: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        executed.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    def call() -> Mapping[str, Tensor]:
        route.call()
        return {}

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.compiler.set_stance("force_eager"):
            return _Eager(traced_call(call, None).values, executed)
    finally:
        sys.settrace(before)


def _other_way(route: Route, graphs: Sequence[Graph]) -> WrongCompiled:
    """The first line that only Dynamo's graphs have, or the first with an op that only eager has; collective.

    A branch on whether it is compiled leads there.
    """
    nodes = (node for graph in graphs for node in graph.module.graph.nodes)
    traced = [line for node in nodes if (line := _line_of(node)) is not None]
    eager = _in_eager(route, {line.file for line in traced})
    line = first(one for one in traced if _place(one) not in eager.executed)
    if line is not None:
        return WrongCompiled(layer=CompilerLayer.DYNAMO, line=line, detail="it runs a line that eager does not")
    known, functions = set(map(_place, traced)), {(one.file, one.function) for one in traced}
    of_ops = [value.line for value in eager.ops if value.line is not None and not value.is_given]
    line = first(one for one in of_ops if _place(one) not in known and (one.file, one.function) in functions)
    detail = "it leaves out a line that eager runs" if line is not None else ""
    return WrongCompiled(layer=CompilerLayer.DYNAMO, line=line, detail=detail)


def _place(line: UserLine) -> tuple[str, int]:
    return line.file, line.line


def _of_backend(graphs: Sequence[Graph]) -> WrongCompiled:
    """What Dynamo traced is right: a backend that is not torch's is wrong then, whatever the collectives in it."""
    own = first(graph.backend for graph in graphs if not isinstance(graph.backend, str))
    if own is None:
        return WrongCompiled(layer=CompilerLayer.UNKNOWN)
    name = backend_name(own)
    return WrongCompiled(layer=CompilerLayer.BACKEND, backend=name, detail=name)


def _without_graph(route: Route, graphs: Sequence[Graph], *, is_seen: bool) -> WrongCompiled | None:
    """No part of a graph is wrong alone: what was run before may have been stale, or have had other random numbers."""
    is_wrong = not route.is_right(_called(route, comparing.searching()))
    if route.any_says("compiled/anew", is_wrong):
        return _of_backend(graphs) if is_wrong or is_seen else None
    is_random = not route.is_right(_called(route, comparing.searching(fallback_random=False)))
    is_random = route.any_says("compiled/random", is_random)
    return WrongCompiled(layer=CompilerLayer.RANDOM if is_random else CompilerLayer.CACHE)


def _called(route: Route, around: AbstractContextManager[None]) -> Any:
    route.reset()
    with around:
        return route.call()


@dataclass(frozen=True)
class _Found:
    """A part of a graph that is wrong alone."""

    wrong: WrongGraph
    part: Part
    finding: WrongCompiled

    @property
    def place(self) -> str:
        """Equal on ranks that need one repro only."""
        line = self.finding.line
        return json.dumps([self.finding.op, self.finding.in_backward, line and [line.file, line.line]])


def _in_parts(
    route: Route, graphs: Sequence[WrongGraph], manifest: Manifest | None, *, name: str
) -> WrongCompiled | None:
    """The first graph that has a part which is wrong alone. Of ranks that found one place the first makes the file."""
    until = time.monotonic() + route.timeout_s
    found = _first_part(graphs, manifest, until=until)
    mine = found.place if found else ""
    places = route.all_say(f"compiled/{name} place", mine)
    makers = {place: rank for rank, place in sorted(places.items(), reverse=True) if place}
    made = None
    if found and makers[mine] == route.rank and route.folder is not None:
        made = _with_repro(route, route.folder, found, timeout_s=until - time.monotonic())
    told = route.all_say(f"compiled/{name} repro", made.model_dump_json(include=_OF_REPRO) if made else "")
    if found is None:
        return None
    of_repro = json.loads(told[makers[mine]] or "{}")
    return WrongCompiled.model_validate(found.finding.model_dump() | of_repro)


def _first_part(graphs: Sequence[WrongGraph], manifest: Manifest | None, *, until: float) -> _Found | None:
    for wrong in graphs:
        left_s = until - time.monotonic()
        part = Search(wrong, timeout_s=left_s / 2).smallest()
        if part is not None:
            return _Found(wrong, part, _described(wrong, part, manifest))
    return None


def _described(wrong: WrongGraph, part: Part, manifest: Manifest | None) -> WrongCompiled:
    difference = part.differences[0]
    node = next((one for one in part.nodes if one.name == difference.node), part.nodes[-1])
    got, wanted = difference.got, difference.wanted
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        got, wanted = first_difference(got, wanted)
    kernel = kernel_of(node, wrong, manifest) if manifest else None
    return WrongCompiled(
        layer=CompilerLayer.UNKNOWN,
        backend=backend_name(wrong.graph.backend),
        op=op_name(node),
        node=node.name,
        line=_line_of(node),
        others=tuple(op_name(one) for one in part.nodes if one is not node),
        kernel=kernel.name if kernel else "",
        kernel_ops=kernel.ops if kernel else (),
        graph=wrong.number,
        in_backward=difference.in_backward or wrong.graph.is_backward,
        got=short(got),
        wanted=short(wanted),
    )


def _with_repro(route: Route, folder: Path, one: _Found, *, timeout_s: float) -> WrongCompiled:
    """Write the file, run it once, and take the layer from it."""
    wrong, found = one.wrong, one.finding
    name = "repro.py" if route.rank == 0 else f"repro.rank{route.rank}.py"
    backend = backend_name(wrong.graph.backend)
    words = f"{backend} wrong result {found.op} silent incorrectness"
    title = f"Compiled by {backend}, {found.op} is {found.got}; in eager it is {found.wanted}."
    path = folder / name
    repro.write(path, one.part, settings=wrong.graph.settings, backend=wrong.graph.backend, title=title, words=words)
    ran = repro.ran(path, timeout_s=max(1.0, timeout_s))
    layer = _layer_of(ran) if ran.fails else CompilerLayer.UNKNOWN
    if layer is CompilerLayer.UNKNOWN and not wrong.of_dynamo:
        layer = CompilerLayer.INDUCTOR  # its graph is right in eager
    shown = name if route.shows_names else str(path)
    detail = next(iter(ran.detail.strip().splitlines()), "")[:120]
    known = {"layer": layer, "detail": detail, "repro": shown, "fails_alone": ran.fails, "words": words}
    return found.model_copy(update=known)


def _layer_of(ran: repro.Ran) -> CompilerLayer:
    if not ran.backend:
        return CompilerLayer.BACKEND  # torch's own backends are right
    known = _LAYERS.get((ran.backend, ran.subsystem))
    return known or _LAYERS.get((ran.backend, None), CompilerLayer.UNKNOWN)


def op_name(node: fx.Node) -> str:
    """`aten.sin`, `torch.nn.functional.silu`, `Tensor.add_`."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet)
    module = getattr(node.target, "__module__", None) or "torch"
    return f"{module}.{getattr(node.target, '__name__', node.target)}"


def _line_of(node: fx.Node) -> UserLine | None:
    return innermost(stack_lines(node.meta.get("stack_trace") or ""))


def backend_name(backend: Any) -> str:
    """Its name, for a person."""
    return backend if isinstance(backend, str) else getattr(backend, "__qualname__", type(backend).__qualname__)


def kernel_of(node: fx.Node, wrong: WrongGraph, manifest: Manifest) -> Launch | None:
    """The kernel that computes a node of a graph; None where none is known."""
    phase = "backward" if wrong.graph.is_backward else "forward"
    for graph in manifest.graphs:
        for launch in graph.launches:
            if graph.phase == phase and node.name in launch.fx:
                return launch
    return None
