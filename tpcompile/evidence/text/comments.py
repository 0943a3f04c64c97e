"""Comments behind a guard and stacks below a reason, as torch prints them -> lines of the user's source."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpcompile.evidence.records import UserLine

_PLACE = re.compile(r"^(?P<file>\S+?):(?P<line>\d+) in (?P<function>\S+)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s+(?P<code>.*)')


def split_comments(text: str) -> tuple[str, list[str]]:
    """Split `expr  # code  # file:line in f` at the first `  # ` outside quotes."""
    quote, escaped = "", False
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote, escaped = char, False
        elif char == "#" and text[index - 1 : index] == " ":
            comment = text[index + 1 :]
            return text[:index].rstrip(), [part.strip() for part in re.split(r"\s{2,}# ", comment)]
    return text, []


def comment_line(comments: Sequence[str]) -> UserLine | None:
    """The line that a comment names; of a long path torch keeps only the end."""
    for index, comment in enumerate(comments):
        match = _PLACE.match(comment)
        if match is not None:
            code = "  # ".join(comments[:index])  # the user's line may hold a comment of its own
            return UserLine(file=match["file"], line=int(match["line"]), function=match["function"], code=code)
    return None


def stack_lines(text: str) -> tuple[UserLine, ...]:
    """Frames of a stack in a text, outermost first."""
    return tuple(map(_frame, _FRAME.finditer(text)))


def _frame(match: re.Match[str]) -> UserLine:
    return UserLine(file=match["file"], line=int(match["line"]), function=match["function"], code=match["code"].strip())
