"""Custom op or Triton kernel in a compiled graph -> the fast path that it is part of, and the lines to name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import Item, UserLine
from tpcompile.evidence.text.lines import is_installed, own_lines
from tpcompile.fastpath.registry import FastPath, registered
from tpcompile.fastpath.source import line_of, python_function
from tpcompile.torch_api import kernels as torch_kernels

TORCH_NAMESPACES = frozenset({
    "aten", "prim", "prims", "higher_order", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional",
    "c10d", "_dtensor", "inductor", "rngprims", "quantized", "quantized_decomposed", "mkldnn", "mkl", "onednn",
    "sym_size", "_inductor_test", "_quantized", "profiler", "debugprims", "static_input",
})  # fmt: skip
"""Namespaces of torch itself; symm_mem is not among them, its fused ops make TP assumptions of their own."""

IN_EAGER = "eager"
"""Stands for the graph of a launch in eager."""

Stack = tuple[UserLine, ...]


@dataclass(frozen=True)
class Seen:
    """What a capture knows of the calls in its graphs, besides the graphs."""

    stacks: Mapping[tuple[str, int], Collection[Stack]] = field(default_factory=dict)
    """File and line of a call -> the stacks that it was traced with, outermost first."""
    kernels: Mapping[str, UserLine] = field(default_factory=dict)
    """Name of each Triton kernel -> where it is."""


@dataclass(frozen=True)
class Use:
    """One call of a custom op or Triton kernel."""

    item: Item
    """Its name, the graph, and the innermost line outside of torch and of our wrappers."""
    stack: Stack = ()
    """Empty where it is not known."""

    @property
    def name(self) -> str:
        """`namespace::op` or `module.kernel`."""
        return self.item.about

    @property
    def path(self) -> FastPath | None:
        """The fast path that this call is part of, a TP-aware one first.

        Fast paths may share a kernel: a launch whose stack is known is part of those whose launcher is on it.
        """
        owners = list(filter(self._is_part_of, registered().values()))
        return max(owners, key=lambda path: path.is_tp_aware, default=None)

    @property
    def line(self) -> UserLine | None:
        """The innermost line of the program, outside of the fast path and of installed packages."""
        programs = [line for line in own_lines(self.stack) if not is_installed(line)]
        inside = set(map(_place, self.path.source.functions)) if self.path else set()
        return last([line for line in programs if (line.file, line.function) not in inside]) or self.item.line

    def defined_at(self, kernels: Mapping[str, UserLine]) -> UserLine | None:
        """Where the kernel is, or the Python function of the op; None for an op that was made in C++."""
        function = python_function(torch_kernels.custom_op(self.name))
        return line_of(function) if function else kernels.get(self.name)

    def _is_part_of(self, path: FastPath) -> bool:
        if self.name not in path.names:
            return False
        return not self._is_launch or _place(path.launcher) in self._functions

    @property
    def _functions(self) -> set[tuple[str, str]]:
        """File and name of the functions on the stack."""
        return {(line.file, line.function) for line in self.stack}

    @property
    def _is_launch(self) -> bool:
        """True for a kernel whose launch was traced by Dynamo, or seen in eager."""
        where = self.item.notes.get("graph")
        return bool(self.stack) and "::" not in self.name and where in ("dynamo", IN_EAGER)


def uses(found: Iterable[Item], seen: Seen) -> Iterator[Use]:
    """Every call, once for each stack that it was traced with."""
    for item in found:
        place = (item.line.file, item.line.line) if item.line else ("", 0)
        for stack in seen.stacks.get(place, [()]):
            yield Use(item, stack)


def _place(function: object) -> tuple[str, str]:
    """File and name of the Python function, as they stand in a stack."""
    code = getattr(python_function(function), "__code__", None)
    return (code.co_filename, code.co_name) if code else ("", "")
