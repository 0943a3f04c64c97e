"""A fault is a set of hooks that the gate calls; each does nothing unless the fault replaces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from tpcompile.by_size import Table
from tpcompile.choices import AllReduce, Profile
from tpcompile.collectives.strategies import Collectives, TpComm

H = TypeVar("H", bound=Callable[..., Any])


@dataclass(frozen=True)
class FaultContext:
    """The rank that the hooks run on, and the rank that gets the fault."""

    rank: int
    world_size: int
    target: int
    """Rank that gets a one-rank fault."""

    @property
    def is_target(self) -> bool:
        """True on the rank that gets a one-rank fault."""
        return self.rank == self.target


@dataclass(frozen=True)
class Fault:
    """One fault of mode C and the hooks that inject it."""

    name: str
    what: str
    """One line on what is broken."""
    needs_gpu: bool = False
    comm: Callable[[Collectives, FaultContext], TpComm] = lambda comm, _: comm
    """Replaces the way collectives are issued."""
    program: Callable[[nn.Module, FaultContext], nn.Module] = lambda stack, _: stack
    """Wraps or edits the stack before it is compiled."""
    compile: Callable[[Any, FaultContext, Callable[[Any], Any]], Any] = lambda program, _, compile_: compile_(program)
    """Compiles the program, or returns it uncompiled."""
    profile: Callable[[Profile, FaultContext], Profile] = lambda profile, _: profile
    """The profile that a rank takes, given that of the run."""
    all_reduce: Callable[[AllReduce, FaultContext], AllReduce | Table] = lambda all_reduce, _: all_reduce
    """How the graphs of a rank sum over ranks, given the setting of the run."""
    phase: Callable[[str, FaultContext], None] = lambda phase, _: None
    """Called with a phase when it begins; `start` precedes the process group, `compiling` each compile of Dynamo."""


ALL: dict[str, Fault] = {}


def injects(hook: str, *, name: str = "", needs_gpu: bool = False) -> Callable[[H], H]:
    """Declare a function or class as the `hook` of a fault, named after it; its docstring says what is broken.

    A class of collectives replaces those of all ranks. Raises ValueError when the name is taken.
    """

    def declare(made: H) -> H:
        def as_collectives(comm: Collectives, context: FaultContext) -> TpComm:
            return made(comm.group)

        used = as_collectives if isinstance(made, type) and issubclass(made, Collectives) else made
        what = (made.__doc__ or "").partition("\n")[0]
        hooks: dict[str, Any] = {hook: used}
        fault = Fault(name=name or made.__name__, what=what, needs_gpu=needs_gpu, **hooks)
        if fault.name in ALL:
            raise ValueError(f"there are two faults named {fault.name!r}")
        ALL[fault.name] = fault
        return made

    return declare
