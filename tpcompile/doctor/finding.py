"""One line of the report: what was looked at, how it is, what to do."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, with a limit or a risk."""
    FAIL = "fail"
    """tpcompile needs it and does not have it."""


class Finding(BaseModel):
    """One line."""

    name: str
    level: Level = Level.OK
    says: str
    todo: str = ""
    """What to do; empty where nothing has to be done."""


def warn(name: str, says: str, todo: str) -> Finding:
    """A line about a limit or a risk."""
    return Finding(name=name, level=Level.WARN, says=says, todo=todo)


def fail(name: str, says: str, todo: str) -> Finding:
    """A line about what is missing."""
    return Finding(name=name, level=Level.FAIL, says=says, todo=todo)
