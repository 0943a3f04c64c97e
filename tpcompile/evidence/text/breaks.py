"""Text of a graph break -> its reason on one line, the user's line and the stack."""

from __future__ import annotations

import re

from tpcompile.evidence.records import GraphBreak, UserLine
from tpcompile.evidence.several import last
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import innermost_own, is_library

_AT = re.compile(r"Graph break in user code at (?P<file>.+):(?P<line>\d+)")
_REASON = re.compile(r"Graph Break Reason: (?P<reason>.*)")


def parse_break(text: str) -> GraphBreak:
    """Parse what torch logs of one graph break."""
    stack = stack_lines(text)
    return GraphBreak(reason=normalise.generic(_reason(text)), line=_blamed(text, stack), stack=stack)


def _reason(text: str) -> str:
    """What torch calls the reason, or else the first line, and its explanation."""
    lines = normalise.stripped_lines(text)
    found = _REASON.search(text)
    parts = [found["reason"].strip()] if found else lines[:1]
    parts += [line for line in lines if line.startswith("Explanation:")][:1]
    return " ".join(filter(None, parts))


def _blamed(text: str, stack: tuple[UserLine, ...]) -> UserLine | None:
    """The user's line; None where the break is in torch and the log does not say who called it."""
    at = _AT.search(text)
    if at is None:
        return innermost_own(stack)
    place = at["file"], int(at["line"])
    here = [line for line in stack if (line.file, line.line) == place]
    innermost = last(here) or UserLine(file=place[0], line=place[1])
    return innermost_own(stack) if is_library(innermost) else innermost
