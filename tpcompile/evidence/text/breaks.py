"""Text of a graph break -> its reason on one line, the user's line and the stack."""

from __future__ import annotations

import re

from tpcompile.evidence.iterables import find, first
from tpcompile.evidence.records import GraphBreak, UserLine
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import in_package, innermost_own, is_library, is_packaged

_AT = re.compile(r"Graph break in user code at (?P<file>.{1,1000}):(?P<line>\d+)")
"""A path is shorter; without a bound the search would be quadratic in the length of a line."""
_REASON = re.compile(r"Graph Break Reason: (?P<reason>.*)")
_NOT_TRACED = re.compile(r"`[^`\n]*+` in file `(?P<file>[^`\n]++)` should not be traced")
"""A function that Dynamo skips: torch's own and those of installed packages as well as the user's."""


def parse_break(text: str) -> GraphBreak:
    """Parse what torch logs of one graph break."""
    stack = stack_lines(text)
    lines = normalise.stripped_lines(text)
    stated = _REASON.search(text)
    # the reason that torch states, else the first line
    reason = stated["reason"].strip() if stated else first(lines)
    explanation = find(lines, lambda line: line.startswith("Explanation:"))
    says = normalise.generic(" ".join(filter(None, [reason, explanation])))
    return GraphBreak(reason=says, line=_blamed(text, stack), stack=stack, library=_library(text))


def _library(text: str) -> str:
    """The file, and the line, of torch or of an installed package that breaks the graph; empty for the user's code."""
    at = _AT.search(text)
    skipped = _NOT_TRACED.search(text)
    if at and is_packaged(at["file"]):
        file = in_package(at["file"])
        return f"{file}:{at['line']}"
    if skipped and is_packaged(skipped["file"]):
        return in_package(skipped["file"])
    return ""


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
