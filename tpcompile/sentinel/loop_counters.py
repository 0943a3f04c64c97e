"""Stack of the program -> its counters: variables of the `for` loops around a call, and numbers of collectives."""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType, FrameType

from tpcompile.recording.variables import variables_of
from tpcompile.sentinel import flight
from tpcompile.sentinel.counter_samples import COLLECTIVES
from tpcompile.torch_api import watching

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST")
_UNPACKS = ("UNPACK_SEQUENCE", "UNPACK_EX", "EXTENDED_ARG", "CACHE")


def counters(frame: FrameType | None, members: Sequence[int]) -> dict[str, int]:
    """Counter -> its current value; takes some microseconds, so it is read at few calls of a region."""
    found = {f"{COLLECTIVES}{name}": number for name, number in watching.collective_numbers(members).items()}
    for caller in watching.frames_from(frame):
        code = caller.f_code
        line = flight.user_line(code.co_filename, caller.f_lineno, code.co_name)
        if line is not None:
            own = {f"`{name}` in {code.co_qualname}": now for name, now in _integers(caller).items()}
            found = own | found  # of a recursive function, the innermost frame
    return found


def _integers(frame: FrameType) -> dict[str, int]:
    """Loop variables of the frame whose current value is an integer."""
    names = loop_variables(frame.f_code)
    if not names:
        return {}
    with variables_of(frame) as values:
        return {name: values[name] for name in names if type(values.get(name)) is int}


@functools.lru_cache(maxsize=1024)
def loop_variables(code: CodeType) -> tuple[str, ...]:
    """Variables that a `for` loop of the function assigns in each iteration."""
    names: list[str] = []
    is_target = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER":
            is_target = True
        elif is_target and instruction.opname in _STORES:
            names += _stored(instruction)
        elif instruction.opname not in _UNPACKS:
            is_target = False
    return tuple(dict.fromkeys(names))


def _stored(instruction: dis.Instruction) -> list[str]:
    """Python 3.13 joins two instructions that store, or one that stores and one that loads."""
    stored = instruction.argval
    if isinstance(stored, str):
        return [stored]
    return list(stored[:1] if instruction.opname == "STORE_FAST_LOAD_FAST" else stored)
