"""Compile in progress -> what others than torch added to the compiler and to its kernels: items for the ban, settings.

Each acts on graphs in which its own name never stands: a pass puts kernels into any graph, a backend runs what it makes
of one, a kernel that replaces torch's runs under the name of torch's op.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import indexed, last
from tpcompile.evidence.layers.environment import COMPILED_WITH, KERNEL_OF
from tpcompile.evidence.records import CompileRecord, Item, UserLine, value_item
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import own_lines
from tpcompile.fastpath.source import source_of
from tpcompile.fastpath.use import replaced_kernel
from tpcompile.torch_api import additions as torchs
from tpcompile.torch_api import makers, registrations

ALONE = "torch alone"


class Additions:
    """Passes, backends, replaced kernels and untraced functions that this process has compiled with so far."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._opaque: dict[str | None, list[Item]] = {}
        """Compile -> functions that stand in its graph as one call."""
        self._kernels: dict[tuple[str, str], registrations.Place] = {}
        self._has_compiled = False

    def note(self, compile_id: str | None) -> None:
        """Read what the compile in progress runs with; call it while the graph of Dynamo is new."""
        self._has_compiled = True
        for item in _compiler_items():
            self._items.setdefault(item.about, item)
        self._opaque[compile_id] = list(_opaque_items())
        self.note_kernels()

    def note_kernels(self, *, thorough: bool = False) -> None:
        """Look for kernels that replace torch's; `thorough` also for those of C++ that was loaded late."""
        for op, key, place in registrations.all_replaced_kernels(thorough=thorough):
            self._kernels.setdefault((op, key), place)

    def items(self, compiles: Iterable[CompileRecord]) -> list[Item]:
        """One item each, for the ban."""
        found = list(self._items.values())
        for (op, key), place in self._kernels.items():
            found.append(replaced_kernel(op, key, place))
        calls: dict[str, Item] = {}
        for compile_ in compiles:
            # AOTAutograd traced the graph, and with it all that Dynamo left as one call
            if compile_.has_lowered:
                continue
            of_compile = self._opaque.get(compile_.compile_id, [])
            calls |= indexed(of_compile, lambda item: item.about)
        return [*found, *calls.values()]

    def environment(self) -> dict[str, str]:
        """Entries for the environment of this rank: with what it compiled, and the kernels that are not torch's."""
        found = {}
        for (op, key), place in self._kernels.items():
            found[f"{KERNEL_OF}{op} ({key})"] = _version(place)
        if self._has_compiled:
            used = [f"{item.about} {item.notes['source']}".strip() for item in self._items.values()]
            found[COMPILED_WITH] = ", ".join(sorted(used)) or ALONE
        return found


def _compiler_items() -> Iterator[Item]:
    backend = torchs.backend()
    for setting, value in torchs.settings(backend):
        for made in makers.made_by_others(value):
            yield _addition(made, f"set as {setting}", "a pass of yours may put any kernel into a graph")
    for table, op, made in torchs.tables(backend):
        yield _addition(made, f"entered for {op} in {table}", f"it replaces what torch makes of {op}")
    for module, made in torchs.patterns(backend):
        yield _addition(made, f"entered in the patterns of {module}", "it replaces parts of any graph")
    for made in makers.made_by_others(backend):
        yield _addition(made, "the backend of torch.compile", "a backend of yours may run any kernel for a graph")


def _opaque_items() -> Iterator[Item]:
    """Functions that stand in the graph as one call, which a backend that does not lower it runs as they are."""
    reason = "nothing traced it (allow_in_graph, nonstrict_trace), and its backend lowers nothing"
    for call in torchs.opaque_calls():
        line = last(own_lines(stack_lines(call.stack)))
        for made in makers.made_by_others(call.function):
            found = _addition(made, "", reason)
            called_at = line or found.line
            notes = {**found.notes, "how": f"called at {called_at}"}
            yield found.model_copy(update={"line": called_at, "notes": notes})


def _addition(made: Any, how: str, reason: str) -> Item:
    place = registrations.place_of(made)
    name = f"{made.__module__}.{made.__qualname__}"
    notes = {"graph": "compiler", "how": how, "reason": reason, "defined": f"{place} in {made.__qualname__}"}
    line = UserLine(file=place.file, line=place.line, function=made.__qualname__)
    item = value_item(name, how, line=line)
    return item.model_copy(update={"notes": {**notes, "source": _source(made)}})


def _source(made: Any) -> str:
    """Hash of the code of a function or class; empty where Python has none."""
    with suppress(ConfigError, OSError, TypeError):
        if not isinstance(made, type):
            return source_of(made).sha256
        return _hash(inspect.getsource(made).encode())
    return ""


def _version(place: registrations.Place) -> str:
    """Name and line of a registration, with the hash of its file where there is one."""
    text = f"{Path(place.file).name}:{place.line}"
    with suppress(OSError):
        return f"{text} {_hash(Path(place.file).read_bytes())}"
    return text


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
