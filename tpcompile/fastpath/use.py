"""Custom op or Triton kernel in a compiled graph -> the fast path that it is part of, and the lines to name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import Item, UserLine, value_item
from tpcompile.evidence.text.lines import is_installed, own_lines
from tpcompile.fastpath.registry import FastPath, registered
from tpcompile.fastpath.source import line_of, python_function
from tpcompile.torch_api import kernels as torch_kernels
from tpcompile.torch_api import makers, registrations

_OWN_ASSUMPTIONS = frozenset({"symm_mem"})
"""Namespaces of torch whose fused ops make TP assumptions of their own."""

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
    """Frames of the call, outermost first; empty where they are not known."""

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

    def defined_at(self, kernels: Mapping[str, UserLine]) -> str:
        """Place of the kernel or of the function of the op, or else of what registered the op."""
        function = python_function(torch_kernels.custom_op(self.name))
        if function is not None:
            return str(line_of(function))
        known = kernels.get(self.name) or self.item.notes.get("defined")
        if known:
            return str(known)
        is_op = "::" in self.name
        for place in _others_places(self.name, "") if is_op else ():
            return registrations.told(place)
        return "in a library without Python source"

    def _is_part_of(self, path: FastPath) -> bool:
        if self.name not in path.names:
            return False
        functions = {(line.file, line.function) for line in self.stack}
        was_traced = self.item.notes.get("graph") in ("dynamo", IN_EAGER)
        is_kernel = "::" not in self.name
        if functions and was_traced and is_kernel:  # the launcher is on the stack of the launch
            return _place(path.launcher) in functions
        return True


def is_torchs_op(namespace: str, op: str, overload: str = "") -> bool:
    """True for an op that torch itself registered, whatever its namespace; without an overload, for all overloads."""
    if namespace in _OWN_ASSUMPTIONS:
        return False
    if namespace == "higher_order":
        found = registrations.higher_order_kernels(op)
        return not makers.made_by_others(found)
    places = _others_places(f"{namespace}::{op}", overload)
    return not places


def is_our_op(namespace: str, op: str, overload: str = "") -> bool:
    """True for an op that this package registered."""
    places = _others_places(f"{namespace}::{op}", overload)
    return bool(places) and all(makers.is_ours(place.file) for place in places)


def _others_places(name: str, overload: str) -> list[registrations.Place]:
    """Places where others than torch registered an op."""
    names = [f"{name}.{overload}"]
    if overload == "default":
        names = [name]
    elif not overload:
        names = registrations.overloads(name) or [name]
    places = []
    for one in names:
        place = registrations.whose_op(one)
        if place is not None:
            places.append(place)
    return places


def replaced_kernel(op: str, key: str, place: registrations.Place) -> Item:
    """A kernel of torch's op that others registered, under this dispatch key; the op is named without its overload."""
    notes = {
        "graph": "any",
        "defined": registrations.told(place),
        "how": "run wherever torch's op is called",
        "reason": f"its kernel for {key.removesuffix('[alias]')} is not torch's",
    }
    line = UserLine(file=place.file, line=place.line)
    return value_item(op.partition(".")[0], "in the dispatcher", line=line).model_copy(update={"notes": notes})


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
