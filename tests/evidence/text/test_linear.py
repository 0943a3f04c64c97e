"""What reads torch's text needs time that grows with its length, not with its square: names may be of any length."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.evidence.text import attacks
from tpcompile.evidence.text import normalise

PACKAGES = (
    "tpcompile.evidence", "tpcompile.report", "tpcompile.fusion.wrapper", "tpcompile.fusion.why_not",
    "tpcompile.sentinel.flight", "tpcompile.sentinel.blackbox", "tpcompile.pytest_plugin.causes",
)  # fmt: skip
SIZE = 60_000
CPU_S = 0.5
"""More than 20 times what any of them needs; what is quadratic needs seconds."""
_USED = re.compile(r"\b(\w+)\.(match|fullmatch|search|sub|finditer|findall|split)\b")


class _TooMuchWork(Exception):
    """A search used up its CPU time."""


@contextmanager
def limited_cpu(seconds: float) -> Iterator[None]:
    """End a search that takes more CPU time of this process: `re` looks for signals while it searches."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooMuchWork

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def searching(name: str, pattern: re.Pattern[Any]) -> Callable[[Any], object]:
    """How its module uses it: at one place, or anywhere in a text."""
    module, _, short = name.partition("[")[0].rpartition(".")
    source = Path(str(sys.modules[module].__file__)).read_text() if module in sys.modules else ""
    uses = {use for used, use in _USED.findall(source) if used == short}
    if uses and uses <= {"match", "fullmatch"}:
        return pattern.match
    return lambda text: pattern.sub(text[:0], text)


def too_slow(name: str, pattern: re.Pattern[Any]) -> list[str]:
    """The first text that the pattern needs too long for."""
    search = searching(name, pattern)
    for text in attacks.texts(pattern, SIZE):
        try:
            with limited_cpu(CPU_S):
                search(text)
        except _TooMuchWork:
            return [f"{name}: {text[:60]!r} ... {text[-20:]!r}"]
    return []


def test_every_pattern_is_linear_in_the_length_of_its_text() -> None:
    found = [slow for name, pattern in attacks.patterns(*PACKAGES).items() for slow in too_slow(name, pattern)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("syntax", [r"\s+at", r"[a-z]+\d*\w*(\[)", r"call\(.*?, \d+\)", r"(?P<a>\w+)[\w.]*\("])
def test_a_quadratic_pattern_is_found(syntax: str) -> None:
    assert too_slow("none.NOT_NAMED[0]", re.compile(syntax))


@pytest.mark.parametrize(
    "text", ["{" * SIZE, "{a, " * SIZE, "{'" + "\\'" * SIZE, "{" * 90 + "b, a" + "}" * 90 + "(" * SIZE]
)
def test_set_displays_are_sorted_in_linear_time(text: str) -> None:
    with limited_cpu(4 * CPU_S):
        normalise.sets(text)
