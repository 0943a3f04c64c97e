"""A page of `tpcompile explain` -> its program, and what it does about it: changed lines or declared differences."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise

from tpcompile.evidence.records.causes import Cause
from tpcompile.explain import page

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_CUT = "@@\n"
"""Between two places of one diff."""
Allowed = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Fix:
    """What a page says to do, as code."""

    says: str
    """The paragraph above it."""
    program: str
    """The corrected program, the same one where differences are declared."""
    allowed: Allowed = ()


@dataclass(frozen=True)
class Example:
    """The program of a page and its fixes."""

    cause: Cause
    program: str
    fixes: tuple[Fix, ...]


def example(cause: Cause) -> Example | None:
    """The program of a cause; None on a page that says how the cause comes about instead."""
    return read(cause, page(cause))


def read(cause: Cause, text: str) -> Example | None:
    """The program in the text of a page."""
    program = ""
    fixes = []
    end = 0
    for block in _BLOCK.finditer(text):
        says = text[end : block.start()].strip().rpartition("\n")[2]
        end = block.end()
        language, body = block.groups()
        if language == "python":
            program = body
        elif language == "diff":
            fixes.append(Fix(says, patched(program, body)))
        elif "--allow" in body:
            fixes.append(Fix(says, program, _allowed(body)))
    return Example(cause, program, tuple(fixes)) if program else None


def patched(program: str, diff: str) -> str:
    """The program with the changes of a diff without line numbers; each place must be there once."""
    for place in diff.split(_CUT):
        lines = [line or " " for line in place.splitlines()]
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        found = f"\n{program}".count(f"\n{before}")
        assert found == 1, f"{found} places for\n{place}"
        program = f"\n{program}".replace(f"\n{before}", f"\n{after}")[1:]
    return program


def _allowed(command: str) -> Allowed:
    words = shlex.split(command.replace("\\\n", " "))
    given = [word for flag, word in pairwise(words) if flag == "--allow"]
    found = []
    for text in given:
        layer, _, rest = text.partition(":")
        contains, _, reason = rest.rpartition(":")
        found.append((layer, contains, reason))
    return tuple(found)
