"""Eager is right, compiled code is wrong -> which layer of the compiler, which op, and a file that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tpcompile.evidence.records.base import Frozen, UserLine, at_text


class CompilerLayer(StrEnum):
    """The first layer of torch.compile whose code is wrong, in the order in which they work."""

    DYNAMO = "Dynamo"
    AOT = "AOTAutograd"
    DECOMPOSITION = "a decomposition"
    PRE_GRAD = "a pre-grad pass"
    JOINT = "a joint-graph pass"
    POST_GRAD = "a post-grad pass"
    LOWERING = "a lowering"
    INDUCTOR = "Inductor's code"
    BACKEND = "the backend"
    CACHE = "code from a compile cache"
    RANDOM = "random numbers"
    """Compiled code draws different ones; nothing is wrong."""
    UNKNOWN = "in no part of it without a collective; the layer is not known"


class WrongCompiled(Frozen):
    """Where compiled code begins to compute something else than eager, while eager is right."""

    layer: CompilerLayer
    backend: str = ""
    detail: str = ""
    """The pass, lowering or setting, as torch's bisector names it."""
    op: str = ""
    """The op whose compiled value is wrong while what it was given is right."""
    node: str = ""
    """Its name in the graph."""
    line: UserLine | None = None
    others: tuple[str, ...] = ()
    """Ops that must be compiled with it."""
    kernel: str = ""
    """The generated kernel that computes it."""
    kernel_ops: tuple[str, ...] = ()
    graph: int = 0
    """Number of the run of a graph, among those of a call."""
    in_backward: bool = False
    got: str = ""
    wanted: str = ""
    repro: str = ""
    """The file: its name in the run directory, else its path; empty without one."""
    fails_alone: bool | None = None
    """What the file did when it was run; None where it was not."""
    words: str = ""
    """What to search for upstream."""
    search_cpu_s: float = 0.0
    red_cpu_s: float = 0.0
    """CPU seconds of the search, and of the compiled call that was red."""

    @property
    def brief(self) -> str:
        """The layer, the op and the kernel, in a line."""
        if self.layer is CompilerLayer.RANDOM:
            return "compiled code draws other random numbers than eager; nothing else differs"
        where = f"{self.layer} ({self.detail})" if self.detail else str(self.layer)
        text = f"eager is right, compiled is wrong: {where}"
        if self.op:
            text += f"; {self.op}{' in the backward' if self.in_backward else ''} is {self.got}, in eager {self.wanted}"
        if self.kernel:
            text += f"; kernel {self.kernel} ({', '.join(self.kernel_ops)})"
        return text

    @property
    def details(self) -> tuple[str, ...]:
        """More lines."""
        found = []
        if self.op:
            found.append(f"node {self.node}{at_text(self.line)}, in run {self.graph} of a graph")
        if self.others:
            found.append(f"compiled together with {', '.join(self.others)}")
        if self.repro:
            alone = {True: "fails alone", False: "does not fail alone", None: "was not run"}[self.fails_alone]
            found.append(f"{self.repro} {alone}; search upstream for: {self.words}")
        if self.search_cpu_s:
            found.append(f"searched for {self.search_cpu_s:.1f} CPU s; the call that was red took {self.red_cpu_s:.1f}")
        return tuple(found)


def first_layer(found: Mapping[int, WrongCompiled]) -> WrongCompiled | None:
    """Of the findings by rank that with the most known, of the lowest rank; None without any."""
    ranked = sorted(found.items(), key=lambda one: (not one[1].op, one[0]))
    return ranked[0][1] if ranked else None
