"""Text of a graph break -> its reason on one line, the user's line and the stack."""

from __future__ import annotations

import re

from tpcompile.evidence.iterables import find, first
from tpcompile.evidence.records import GraphBreak, UserLine
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import innermost_own, is_library

_AT = re.compile(r"Graph break in user code at (?P<file>.{1,1000}):(?P<line>\d+)")
"""A path is shorter; without a bound the search would be quadratic in the length of a line."""
_REASON = re.compile(r"Graph Break Reason: (?P<reason>.*)")


def parse_break(text: str) -> GraphBreak:
    """Parse what torch logs of one graph break."""
    stack = stack_lines(text)
    return GraphBreak(reason=normalise.generic(_reason(text)), line=_blamed(text, stack), stack=stack)


def _reason(text: str) -> str:
    """The reason that torch states, else the first line; then torch's explanation."""
    lines = normalise.stripped_lines(text)
    stated = _REASON.search(text)
    reason = stated["reason"].strip() if stated else first(lines)
    explanation = find(lines, lambda line: line.startswith("Explanation:"))
    return " ".join(filter(None, [reason, explanation]))


def _blamed(text: str, stack: tuple[UserLine, ...]) -> UserLine | None:
    """The user's line; None where the break is in torch and the log does not name the caller."""
    at = _AT.search(text)
    if at is None:
        return innermost_own(stack)
    broke_at = UserLine(file=at["file"], line=int(at["line"]))
    for line in stack:
        if (line.file, line.line) == (broke_at.file, broke_at.line):
            broke_at = line  # with its function and code; of a recursion the innermost
    if is_library(broke_at):
        return innermost_own(stack)
    return broke_at
