"""The frame that runs an op, and the lines of the user's that led to it.

Of `__torch_dispatch__` of a mode: `caller` and `callers` count the frames between it and themselves.
"""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType, FrameType

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.lines import is_library_file
from tpcompile.numerics import drawn

_FOLLOWING = {Path(__file__).parent, *(Path(__file__).parents[1] / name for name in ("gate", "typecheck"))}
"""Folders of the code around a run."""
_ENGINE = "_engine_run_backward"
"""What torch calls the engine of autograd in: frames outside of it are not those of the backward pass."""
_MOST_CALLERS = 6
_DEEP = 8
"""Frames in which a mode that is inside of this one is looked for: torch has some between the two."""


def caller() -> FrameType:
    """The frame that runs an op: a mode that is inside of this one, and torch's frames of it, are between."""
    frame = innermost = sys._getframe(3)
    for one, _ in islice(traceback.walk_stack(innermost), _DEEP):
        if one.f_code.co_filename == drawn.__file__ and one.f_back is not None:
            frame = one.f_back
    return frame


def is_by_hand(frame: FrameType) -> bool:
    """True for an op of a backward pass that the program's own code runs: of an autograd function, or a hook."""
    for one, _ in traceback.walk_stack(frame):
        if one.f_code.co_name == _ENGINE:
            return False
        if not is_library_file(one.f_code.co_filename):
            return True
    return False


@functools.cache
def follows_run(file: str) -> bool:
    """True for code that keeps weights ahead of a run and copies what it returns."""
    return Path(file).parent in _FOLLOWING


def callers() -> tuple[UserLine, ...]:
    """The lines of the user's outside of the innermost one, up to what runs the program."""
    frames = traceback.walk_stack(caller())
    inside = takewhile(lambda one: not follows_run(one[0].f_code.co_filename), frames)
    users = ((frame.f_code, number) for frame, number in inside if not is_library_file(frame.f_code.co_filename))
    return _lines(tuple(islice(users, 1, _MOST_CALLERS)))


@functools.lru_cache(maxsize=4096)
def _lines(places: tuple[tuple[CodeType, int], ...]) -> tuple[UserLine, ...]:
    """The lines of these codes: the ops of a line share them."""
    return tuple(
        UserLine(
            file=code.co_filename,
            line=number,
            function=code.co_name,
            code=linecache.getline(code.co_filename, number).strip(),
        )
        for code, number in places
    )
