"""Stack of an op -> the line to look at: that of a module rather than of a helper that moves numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.lines import is_library_file, line_at
from tpcompile.numerics.op_names import COLLECTIVES, SAME_VALUES

_OWN = f"{Path(__file__).parent}/"
_RUNS = str(Path(__file__).with_name("program.py"))
_MOVES = SAME_VALUES | {"aten.cat", "aten.stack", "aten.copy_"}


def line_in_module(name: str, frame: FrameType) -> UserLine:
    """The innermost line of the user's; for a collective, and what takes apart or puts together, that of a module.

    A helper that gathers is right by itself: what is wrong is where it is used. A line of this package where the user
    has none.
    """
    frames = list(_frames(frame))
    if not frames:
        return UserLine(file=_RUNS, line=0)
    found = frames[0]
    if name.startswith(COLLECTIVES) or name in _MOVES:
        found = next((each for each in frames if _is_of_module(each)), found)
    return line_at(found, found.f_lineno)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Those of the user's, innermost first, up to the code that runs the program."""
    while frame is not None and frame.f_code.co_filename != _RUNS:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN) and not is_library_file(file):
            yield frame
        frame = frame.f_back


def _is_of_module(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), torch.nn.Module)
