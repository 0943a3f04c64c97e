"""A long text -> its beginning and its end, with the number of characters left out between them."""

from __future__ import annotations

import re

MAX_NAME_CHARS = 400
"""Longest name or path that is printed whole; JSON files hold all of it."""
MAX_LINE_CHARS = 4000
"""Longest line of a report."""
_LONG_WORD = re.compile(rf"\S{{{MAX_NAME_CHARS + 1},}}")


def shortened(text: str, *, at_most: int) -> str:
    """The text; one of more characters without its middle: `forward_aaa...(1234 characters)...aaa`."""
    num_left_out = len(text) - at_most
    if num_left_out <= 0:
        return text
    half = at_most // 2
    return f"{text[:half]}...({len(text) - 2 * half} characters)...{text[-half:]}"


def with_short_names(text: str) -> str:
    """The text, each of whose names and lines is shortened where it is too long to be printed."""
    if len(text) <= MAX_NAME_CHARS:
        return text
    text = _LONG_WORD.sub(lambda word: shortened(word[0], at_most=MAX_NAME_CHARS), text)
    return "\n".join(shortened(line, at_most=MAX_LINE_CHARS) for line in text.split("\n"))
