"""What a group of ranks has at a difference, and its cause -> the group, with the line that a person can change."""

from __future__ import annotations

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import CompileDigest, Item, RankGroup, UserLine
from tpcompile.evidence.text.lines import is_installed

_WITHIN = frozenset({
    Cause.RANK_BRANCH, Cause.RANK_CONSTANT, Cause.GRAPH_BREAK, Cause.COMPILE_FAILED, Cause.PYTHON_VALUE,
    Cause.SET_ORDER, Cause.DICT_ORDER, Cause.REDUCE_OP, Cause.GROUP, Cause.ORDER_FORWARD, Cause.ORDER_BACKWARD,
    Cause.EXTRA_COLLECTIVE, Cause.COLLECTIVE_SIZES, Cause.UNWAITED, Cause.UNUSED_RESULT,
})  # fmt: skip
"""Causes that stand in the compiled code itself, in an installed package, too. What else differs comes from outside."""


def rank_group(
    ranks: tuple[int, ...],
    item: Item | None,
    compile_: CompileDigest,
    cause: Cause,
    *,
    line: UserLine | None = None,
) -> RankGroup:
    """The group; `line` stands for that of the frame.

    Where the cause lies outside of the compiled code, the line of the program that called it says more than its first
    line, and a line inside of an installed package helps nobody.
    """
    called_at = compile_.called_at or compile_.entered_at
    if item and item.line:
        item = item.at(of_cause(cause, item.line, called_at))
    return RankGroup(ranks=ranks, item=item, frame_line=of_cause(cause, line, called_at) or compile_.line)


def of_cause(cause: Cause, line: UserLine | None, called_at: UserLine | None) -> UserLine | None:
    """The line; for a cause outside of the compiled code, where the line is not the program's, that which calls it."""
    if cause in _WITHIN or called_at is None:
        return line
    return called_at if line is None or is_installed(line) else line
