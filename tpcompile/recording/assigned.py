"""Code -> the names that each of its lines gives a value, and its arguments: what `flow.c` looks at while it runs."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import NamedTuple

from tpcompile.evidence.timeline.flow import GLOBAL, LENGTH

_MAX_LINES = 4096
"""Lines of one code whose values are recorded; of those behind, only that they were executed is."""
_ANY = 1 << 30
"""Larger than any line: what a line stores is recorded wherever the code goes on."""
_CHANGES = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "rotate", "setdefault", "sort", "update",
})  # fmt: skip
"""Methods of containers after which these are recorded: `rows.append(row)` gives `rows` a value, too."""
Spec = tuple[int, str, str | None, bool]
"""(number of the name, variable, attribute of it or None, whether the variable is one of the module)."""


class Line(NamedTuple):
    """What a line stores, where it is followed by a line from `first` to `last`: the end of a loop stores nothing."""

    first: int
    last: int
    specs: tuple[Spec, ...]


class Assigned(NamedTuple):
    """The names of one code."""

    names: tuple[str, ...]
    """`size`, or `self.scale`, by number."""
    by_line: tuple[Line | None, ...]
    """What each line stores; the first entry is the line on which the code begins."""
    arguments: tuple[Spec, ...]


NOTHING = Assigned((), (), ())


def assigned(code: CodeType) -> Assigned:
    """What its bytecode stores into variables, and into attributes of variables."""
    is_module = code.co_name == "<module>"
    if not (is_module or code.co_flags & inspect.CO_OPTIMIZED):  # the body of a class has variables of its own kind
        return NOTHING
    numbers: dict[str, int] = {}
    lines: dict[int, dict[Spec, None]] = {}

    def spec(name: str, attribute: str | None = None, *, is_global: bool = False) -> Spec | None:
        text = f"{name}.{attribute}" if attribute else f"{GLOBAL}{name}" if is_global else name
        number = numbers.setdefault(text, len(numbers))
        return (number, name, attribute, is_module or is_global) if number < LENGTH else None

    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    named = [name for name in given if name not in ("self", "cls") and not name.startswith(".")]
    arguments = [found for name in named if (found := spec(name))]
    line = code.co_firstlineno
    instructions = list(dis.get_instructions(code))
    for at, one in enumerate(instructions):
        line = _line_of(one) or line
        stored = [spec(name, is_global=one.opname == "STORE_GLOBAL") for name in _stored(one)]
        load, attribute = _changed(instructions, at)
        if load is not None and (name := _loaded(load)) is not None:
            stored.append(spec(name, attribute, is_global=load.opname == "LOAD_GLOBAL"))
        lines.setdefault(line, {}).update({each: None for each in stored if each is not None})
    num_lines = min(max(lines, default=code.co_firstlineno) - code.co_firstlineno + 1, _MAX_LINES)
    bodies = dict(_bodies(instructions))
    by_line: list[Line | None] = []
    for at in range(code.co_firstlineno, code.co_firstlineno + max(num_lines, 0)):
        specs = tuple(lines.get(at, ()))
        by_line.append(Line(*bodies.get(at, (0, _ANY)), specs) if specs else None)
    return Assigned(tuple(numbers)[:LENGTH], tuple(by_line), tuple(arguments))


def _bodies(instructions: Sequence[dis.Instruction]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Line of a loop -> first and last line of its body."""
    for number, one in enumerate(instructions):
        if one.opname != "FOR_ITER":
            continue
        line = _line_of(one)
        inside = [each for each in instructions[number + 1 :] if each.offset < one.argval]
        body = set(map(_line_of, inside)) - {line, 0}
        if line and body:
            yield line, (min(body), max(body))


def _line_of(one: dis.Instruction) -> int:
    """Line of an instruction; 0 where the compiler noted none."""
    return (one.positions and one.positions.lineno) or 0


Changed = tuple[dis.Instruction | None, str | None]
"""(what loads an object of which an attribute is stored, or a container that is changed; the attribute or None)."""


def _changed(instructions: Sequence[dis.Instruction], at: int) -> Changed:
    """What an instruction changes; None for all but those that store an attribute or an item, or ask for a method."""
    one = instructions[at]
    if one.opname == "STORE_ATTR":
        return _holder(instructions, at), one.argval
    if one.opname == "STORE_SUBSCR":
        before = _before_value(instructions, at) - 1  # below the key
    elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.argval in _CHANGES:
        before = at - 1
    else:
        return None, None
    if before > 0 and instructions[before].opname == "LOAD_ATTR":
        return instructions[before - 1], instructions[before].argval
    return (instructions[before] if before >= 0 else None), None


def _holder(instructions: Sequence[dis.Instruction], at: int) -> dis.Instruction | None:
    """What loads the object whose attribute is stored; of `self.count += 1` before the attribute was loaded."""
    if at == 0 or instructions[at - 1].opname != "SWAP":
        return instructions[at - 1] if at else None
    for number in range(at - 1, 1, -1):
        one = instructions[number]
        is_same = one.opname == "LOAD_ATTR" and one.argval == instructions[at].argval
        if is_same and instructions[number - 1].opname == "COPY":
            return instructions[number - 2]
    return None


def _before_value(instructions: Sequence[dis.Instruction], at: int) -> int:
    """Index of the first instruction that computes the value on top of the stack; 0 where there are branches in it."""
    missing = 1
    for number in range(at - 1, -1, -1):
        one = instructions[number]
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            break
        missing -= dis.stack_effect(one.opcode, one.arg)
        if missing <= 0:
            return number
    return 0


def _stored(one: dis.Instruction) -> tuple[str, ...]:
    """Variables that an instruction stores: from Python 3.13 on one of them may store two, or load the second."""
    if one.opname in ("STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"):
        return (one.argval,)
    if not one.opname.startswith("STORE_FAST"):
        return ()
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    return names if one.opname == "STORE_FAST_STORE_FAST" else names[:1]


def _loaded(one: dis.Instruction) -> str | None:
    """The variable that an instruction loads last."""
    if not one.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
        return None
    return one.argval[-1] if isinstance(one.argval, tuple) else str(one.argval)
