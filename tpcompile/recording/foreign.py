"""Compiled graphs and generated code -> the custom ops and user Triton kernels in them, by their names.

A graph holds a Triton kernel and its constants as places in a table of the process, in order of what was traced so far:
ranks with different histories have different numbers for equal launches, and a reset empties the table. `Launches` puts
names in the place of the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from tpcompile.errors import ConfigError
from tpcompile.evidence.compiles.collectives import blamed_line
from tpcompile.evidence.compiles.events import TraceEvent
from tpcompile.evidence.records import CompileRecord, Graph, Item, UserLine, value_item
from tpcompile.fastpath.source import kernel_name, line_of, python_function, source_of
from tpcompile.fastpath.use import is_our_op, is_torchs_op
from tpcompile.torch_api import kernels as torch_kernels

NAMELESS = "triton kernel"
"""A launch of which only its number in a table of the process is known."""

_OP = re.compile(r"^torch\.ops\.\w+\.\w+(?:\.\w+)?$")
_CALLED = re.compile(r"\btorch\.ops\.\w+\.\w+(?:\.\w+)?(?=\()")


def foreign_ops(compiles: Iterable[CompileRecord]) -> tuple[Item, ...]:
    """Each custom op and user Triton kernel once per line: `namespace::op` or `module.kernel`, with the user's line.

    An op that only the generated code calls was put there by a pass, and has no line.
    """
    compiles = tuple(compiles)
    graphs = chain.from_iterable(compile_.graphs for compile_ in compiles)
    found = list(chain.from_iterable(map(_foreign_items, graphs)))
    in_graphs = {item.about for item in found}
    generated = chain.from_iterable(map(_only_generated, compiles))
    found += [item for item in generated if item.about not in in_graphs]
    once: dict[tuple[str, UserLine | None], Item] = {}
    for item in found:
        once.setdefault((item.about, item.line), item)
    return tuple(sorted(once.values(), key=lambda item: item.about))


def _foreign_items(graph: Graph) -> Iterator[Item]:
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        name = ""
        if node.op == "call":
            name = dict(node.kwargs).get("kernel", NAMELESS).strip("'") if node.is_launch else _foreign_op(node.target)
        is_text_of_cache = name == NAMELESS and graph.kind != "dynamo"  # the call that launches it is in Dynamo's graph
        if not name or is_text_of_cache:
            continue
        line = blamed_line(nodes, index)
        item = value_item(name, f"in the {graph.kind} graph", line=line)
        notes = {"graph": graph.kind}
        yield item.model_copy(update={"notes": notes})


def _foreign_op(target: str) -> str:
    """`namespace::op` of a call of an op that torch did not register, empty for any other call."""
    if not _OP.match(target):
        return ""
    namespace, op, overload = _parts(target)
    return "" if is_torchs_op(namespace, op, overload) else f"{namespace}::{op}"


def _parts(target: str) -> tuple[str, str, str]:
    """Namespace, op and overload of `torch.ops.namespace.op.overload`, the last empty where it is left out."""
    namespace, op, *overload = target.split(".")[2:]
    return namespace, op, "".join(overload)


def _only_generated(compile_: CompileRecord) -> Iterator[Item]:
    """Ops of others that the generated code calls; our own passes put ops of ours there."""
    code = "\n".join(kernel.code for kernel in compile_.kernels)
    names = set()
    for target in set(_CALLED.findall(code)):
        if not is_our_op(*_parts(target)):
            names.add(_foreign_op(target))
    for name in sorted(names - {""}):
        notes = {"graph": "generated", "how": "called by the generated code, where a pass put it"}
        item = value_item(name, "in the generated code")
        yield item.model_copy(update={"notes": notes})


_LOWERED_HERE = frozenset({"aotautograd_cache_miss", "aotautograd_cache_bypass"})
_LAUNCH = "triton_kernel_wrap"
_NUMBER = re.compile(r"\b(kernel_idx|constant_args_idx) = (\d+)")


class Launches:
    """The Triton kernels that graphs of this process launch."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        """Name of each kernel -> hash of its source, empty where Python has none."""
        self.lines: dict[str, UserLine] = {}
        """Name of each kernel -> where it is."""
        self._lowered_here: set[str | None] = set()
        """Compiles whose AOT graphs were made in this process; those from a cache have numbers of a different one."""

    def named(self, event: TraceEvent) -> TraceEvent:
        """The event with names and constants for numbers in the text of its graph; call it while the graph is new."""
        if event.name in _LOWERED_HERE:
            self._lowered_here.add(event.compile_id)
        is_new = event.name == "dynamo_output_graph" or event.compile_id in self._lowered_here
        if not is_new or _LAUNCH not in event.payload:
            return event
        return replace(event, payload=_NUMBER.sub(self._named, event.payload))

    def _named(self, number: re.Match[str]) -> str:
        what, place = number[1], int(number[2])
        if what == "constant_args_idx":
            return f"constants = {_text(torch_kernels.triton_constants(place))!r}"
        return f"kernel = {self._kernel(torch_kernels.triton_kernel(place))!r}"

    def _kernel(self, kernel: Any) -> str:
        function = python_function(kernel)
        if function is None:
            return NAMELESS
        name = kernel_name(function)
        self.lines[name] = line_of(function)
        if name not in self.sources:
            try:
                self.sources[name] = source_of(kernel).sha256
            except ConfigError:
                self.sources[name] = ""
        return name


def _text(constants: Mapping[str, Any]) -> str:
    """Values that print alike in every process, of others their type."""
    plain = bool | int | float | str | None
    return ", ".join(
        f"{name}={value if isinstance(value, plain) else type(value).__name__}"
        for name, value in sorted(constants.items())
    )
