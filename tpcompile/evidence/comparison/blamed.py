"""The item of a group of ranks at a difference, and its cause -> the group, with the line that the user can change."""

from __future__ import annotations

from tpcompile.evidence.records import CompileDigest, Item, RankGroup, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.lines import is_installed

_WITHIN = frozenset({
    Cause.RANK_BRANCH, Cause.RANK_CONSTANT, Cause.GRAPH_BREAK, Cause.COMPILE_FAILED, Cause.PYTHON_VALUE,
    Cause.SET_ORDER, Cause.DICT_ORDER, Cause.REDUCE_OP, Cause.GROUP, Cause.ORDER_FORWARD, Cause.ORDER_BACKWARD,
    Cause.EXTRA_COLLECTIVE, Cause.COLLECTIVE_SIZES, Cause.UNWAITED, Cause.UNUSED_RESULT,
})  # fmt: skip
"""Causes in the compiled code itself, also where that is an installed package. All others come from outside of it."""


def rank_group(
    ranks: tuple[int, ...],
    item: Item | None,
    compile_: CompileDigest,
    cause: Cause,
    *,
    line: UserLine | None = None,
) -> RankGroup:
    """The group; `line` replaces that of the frame.

    For a cause outside of the compiled code, a line in an installed package, or no line, is replaced by the line of the
    user's program that calls the compiled code.
    """
    called_at = compile_.called_at or compile_.entered_at
    if item and item.line:
        item = item.changed(line=of_cause(cause, item.line, called_at))
    frame_line = of_cause(cause, line, called_at)
    if frame_line is None:
        frame_line = compile_.entered_at or compile_.line
    return RankGroup(ranks=ranks, item=item, frame_line=frame_line)


def of_cause(cause: Cause, line: UserLine | None, called_at: UserLine | None) -> UserLine | None:
    """The line; for a cause outside of the compiled code, `called_at` where the line is not the user's."""
    if cause in _WITHIN or called_at is None:
        return line
    return called_at if line is None or is_installed(line) else line
