"""Graphs as torch prints them -> with the names of a user's Triton kernels where torch has numbers.

A graph holds a kernel and its constants as places in a table of the process, in order of what was traced so far: ranks
with different histories have different numbers for equal launches, and a reset empties the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpcompile.errors import ConfigError
from tpcompile.evidence.compiles.trace import TraceEvent
from tpcompile.evidence.records import UserLine
from tpcompile.fastpath.source import kernel_name, line_of, python_function, source_of
from tpcompile.recording.foreign import NAMELESS
from tpcompile.torch_api import kernels as torch_kernels

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
