"""Comments after a guard and stacks below a recompile reason, as torch prints them -> lines of the user's source."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpcompile.evidence.records import UserLine

_COMMENTED = re.compile(r"(?P<code>(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^'\"])*? )#(?P<comment>.*)", re.DOTALL)
"""Code, whose string literals may hold a `#`, and the comment after it."""
_NEXT_COMMENT = re.compile(r"(?<!\s)\s{2,}+# ")
_PLACE = re.compile(r"^(?P<file>\S+?):(?P<line>\d+) in (?P<function>\S+)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s+(?P<code>.*)')


def split_comments(text: str) -> tuple[str, list[str]]:
    """Split `expr  # code  # file:line in f` at the first `  # ` outside quotes."""
    match = _COMMENTED.match(text)
    if match is None:
        return text, []
    return match["code"].rstrip(), [part.strip() for part in _NEXT_COMMENT.split(match["comment"])]


def comment_line(comments: Sequence[str]) -> UserLine | None:
    """The line that a comment names; of a long path torch keeps only the end."""
    for index, comment in enumerate(comments):
        match = _PLACE.match(comment)
        if match is not None:
            code = "  # ".join(comments[:index])  # the user's line may end in a comment
            number = int(match["line"])
            return UserLine(file=match["file"], line=number, function=match["function"], code=code)
    return None


def stack_lines(text: str) -> tuple[UserLine, ...]:
    """Frames of a stack in a text, outermost first."""
    return tuple(map(line_of, _FRAME.finditer(text)))


def line_of(match: re.Match[str]) -> UserLine:
    """The line that a match with the groups `file`, `line`, `function` and `code` names."""
    return UserLine(file=match["file"], line=int(match["line"]), function=match["function"], code=match["code"].strip())
