"""Compiled code that is wrong while eager is right -> the layer of the compiler, the op, the kernel, and a repro.

All ranks run the program again, each graph beside its eager values; then a rank whose graphs are wrong searches alone in
parts of them, which have no collectives. Inductor's graphs come first: their tensors are plain, and there are those of
the backward. Then Dynamo's, for any backend. What is left are the random numbers of compiled code, and stale code.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from tpcompile.evidence.records import CompilerLayer, UserLine, WrongCompiled
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import innermost
from tpcompile.numerics import repro
from tpcompile.numerics.beside_eager import Comparison, WrongGraph, first_difference, short
from tpcompile.numerics.smallest import Part, Search
from tpcompile.torch_api import comparing

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
_FRAGMENT = "#   %{node} : "
_KERNEL = re.compile(r"\b((?:cpp|triton)_\w+|extern_kernels\.\w+|torch\.ops\.\w+\.\w+)[.(]")
_ATEN = re.compile(r"Original ATen: \[(.*)\]")


@dataclass(frozen=True)
class Route:
    """The compiled program, as the route that found it wrong calls it."""

    call: Callable[[], Any]
    """Compiles where it must, and calls once."""
    is_right: Callable[[Any], bool]
    """True where a result is that of eager; all ranks call it alike."""
    reset: Callable[[], object]
    """Forget what was compiled."""
    any_says: Callable[[str, bool], bool]
    """True on all ranks where any says True."""
    backend: str
    folder: Path | None
    """Where repro.py is written; None for nowhere."""
    timeout_s: float
    """For what a rank does alone."""
    rank: int = 0
    red_cpu_s: float = 0.0


def search(route: Route) -> WrongCompiled | None:
    """The finding of this rank; None where it is right here. All ranks must call it."""
    began = time.process_time()
    found = _found(route)
    if found is None:
        return None
    spent = {"search_cpu_s": round(time.process_time() - began, 2), "red_cpu_s": round(route.red_cpu_s, 2)}
    return found.model_copy(update={"backend": route.backend, **spent})


def _found(route: Route) -> WrongCompiled | None:
    if route.backend == "inductor":
        inner = Comparison()
        _called(route, comparing.inductor_graphs(inner.on_run))
        found = _in_parts(route, inner.wrong)
        if route.any_says("compiled/inductor", found is not None):
            return found
    outer = Comparison(of_dynamo=True)
    result = _called(route, comparing.dynamo_graphs(outer.on_run))
    is_traced_wrong = not route.is_right(result)  # these are the values of Dynamo's graphs in eager
    if route.any_says("compiled/dynamo", is_traced_wrong):
        return WrongCompiled(layer=CompilerLayer.DYNAMO) if is_traced_wrong else None
    found = _in_parts(route, outer.wrong)
    if route.any_says("compiled/graph", found is not None):
        return found
    return _without_graph(route, is_seen=bool(outer.wrong))


def _without_graph(route: Route, *, is_seen: bool) -> WrongCompiled | None:
    """No part of a graph is wrong alone: what was run before may have been stale, or have had other random numbers."""
    is_wrong = not route.is_right(_called(route, comparing.searching()))
    if route.any_says("compiled/anew", is_wrong):
        return WrongCompiled(layer=CompilerLayer.UNKNOWN) if is_wrong or is_seen else None
    is_random = not route.is_right(_called(route, comparing.searching(fallback_random=False)))
    is_random = route.any_says("compiled/random", is_random)
    return WrongCompiled(layer=CompilerLayer.RANDOM if is_random else CompilerLayer.CACHE)


def _called(route: Route, around: AbstractContextManager[None]) -> Any:
    route.reset()
    with around:
        return route.call()


def _in_parts(route: Route, graphs: Sequence[WrongGraph]) -> WrongCompiled | None:
    """The first graph that has a part which is wrong alone; a rank does this on its own."""
    until = time.monotonic() + route.timeout_s
    for wrong in graphs:
        left_s = until - time.monotonic()
        part = Search(wrong, backend=route.backend, timeout_s=left_s / 2).smallest()
        if part is not None:
            return _described(route, wrong, part, timeout_s=until - time.monotonic())
    return None


def _described(route: Route, wrong: WrongGraph, part: Part, *, timeout_s: float) -> WrongCompiled:
    difference = part.differences[0]
    node = next((one for one in part.nodes if one.name == difference.node), part.nodes[-1])
    got, wanted = difference.got, difference.wanted
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        got, wanted = first_difference(got, wanted)
    kernel, kernel_ops = kernel_of(node.name, wrong.graph.code)
    found = WrongCompiled(
        layer=CompilerLayer.UNKNOWN,
        op=op_name(node),
        node=node.name,
        line=_line_of(node),
        others=tuple(op_name(one) for one in part.nodes if one is not node),
        kernel=kernel,
        kernel_ops=kernel_ops,
        graph=wrong.number,
        in_backward=difference.in_backward,
        got=short(got),
        wanted=short(wanted),
    )
    return _with_repro(route, wrong, part, found, timeout_s=timeout_s)


def _with_repro(
    route: Route, wrong: WrongGraph, part: Part, found: WrongCompiled, *, timeout_s: float
) -> WrongCompiled:
    """Write the file, run it once, and take the layer from it."""
    if route.folder is None:
        return found
    name = "repro.py" if route.rank == 0 else f"repro.rank{route.rank}.py"
    words = f"{route.backend} wrong result {found.op} silent incorrectness"
    title = f"Compiled by {route.backend}, {found.op} is {found.got}; in eager it is {found.wanted}."
    path = route.folder / name
    repro.write(path, part, settings=wrong.graph.settings, backend=route.backend, title=title, words=words)
    ran = repro.ran(path, timeout_s=max(1.0, timeout_s))
    layer = _layer_of(ran) if ran.fails else CompilerLayer.UNKNOWN
    if layer is CompilerLayer.UNKNOWN and wrong.graph.code:
        layer = CompilerLayer.INDUCTOR  # its graph is right in eager
    known = {"layer": layer, "detail": _in_short(ran.detail), "repro": name, "fails_alone": ran.fails, "words": words}
    return found.model_copy(update=known)


def _layer_of(ran: repro.Ran) -> CompilerLayer:
    if not ran.backend:
        return CompilerLayer.BACKEND  # torch's own backends are right
    known = _LAYERS.get((ran.backend, ran.subsystem))
    return known or _LAYERS.get((ran.backend, None), CompilerLayer.UNKNOWN)


def _in_short(detail: str) -> str:
    lines = detail.strip().splitlines()
    return lines[0][:120] if lines else ""


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


def kernel_of(node: str, code: str) -> tuple[str, tuple[str, ...]]:
    """The kernel in generated code that computes a node, with its ops; empty where the code does not say."""
    lines = code.splitlines()
    wanted = _FRAGMENT.format(node=node)
    at = next((number for number, line in enumerate(lines) if line.strip().startswith(wanted)), None)
    if at is None:
        return "", ()
    before = (_ATEN.search(line) for line in reversed(lines[:at]))
    ops = next(filter(None, before), None)
    after = (_KERNEL.search(line) for line in lines[at:] if not line.strip().startswith("#"))
    kernel = next(filter(None, after), None)
    if kernel is None:
        return "", ()
    return kernel[1], tuple(ops[1].split(", ")) if ops else ()
