"""What every record is made of: immutable models, layers, lines of source, items."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 5
"""Incremented when a record changes shape; a reader refuses any other version."""


class Frozen(BaseModel):
    """Immutable record; an unknown key, a typo or a field of a newer schema, is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")  # "NaN": JSON has no such number

    def to_json(self, *, indent: int | None = None) -> str:
        """Sorted JSON: equal records give equal text."""
        # model_dump leaves NaN as a float, which json writes as a word that is no JSON
        return json.dumps(json.loads(self.model_dump_json()), sort_keys=True, indent=indent)

    def changed(self, **fields: Any) -> Self:
        """The same record with other values in these fields."""
        return self.model_copy(update=fields)


class Worded(StrEnum):
    """Names, each with a text for the reader."""

    text: str

    def __new__(cls, name: str, text: str = "") -> Self:
        """A member: `NAME = "name", "text"`, or its name alone."""
        found = str.__new__(cls, name)
        found._value_ = name
        found.text = text
        return found


class Layer(StrEnum):
    """Layers of a digest, from cause to effect; the first that differs is the finding."""

    ENVIRONMENT = "environment"
    INPUTS = "inputs"
    GRAPH = "graph"
    GUARDS = "guards"
    COLLECTIVES = "collectives"
    LOWERED = "lowered"
    KERNELS = "kernels"


class UserLine(Frozen):
    """A line of source: `file:line`, the function around it and the code on it."""

    file: str
    line: int
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


def at_text(line: UserLine | None) -> str:
    """` at model.py:3`; empty where no line is known."""
    return f" at {line}" if line else ""


class HasLine(Protocol):
    """Anything that may have a line of source."""

    @property
    def line(self) -> UserLine | None:
        """The line, None where it is not known."""


def lines_of(things: Iterable[HasLine]) -> list[UserLine]:
    """The known lines of these things."""
    return known(thing.line for thing in things)


def known(lines: Iterable[UserLine | None]) -> list[UserLine]:
    """The lines that are known."""
    return list(filter(None, lines))


class ItemKind(Worded):
    """What an item is, and its fields as one line."""

    VALUE = "value", "{value}"
    SETTING = "setting", "{value}"
    """A setting of the process that a guard checks: autocast, grad mode, ..."""
    INPUT = (
        "input",
        "dtype={dtype} shape={shape} stride={stride} device={device} requires_grad={requires_grad} dynamic={dynamic}",
    )
    NODE = "node", "{op} {target}({args}) -> {value}"
    BREAK = "graph break", "{reason}"
    FAILURE = "failed compile", "{error}"
    GUARD = "guard", "{type}: {expression}"
    COLLECTIVE = (
        "collective",
        "{op}(reduce_op={reduce_op}, dtype={dtype}, shape={shape}, group={group}, waited={waited})",
    )
    CODE = "code", "{code}"
    """A line of generated code."""
    LAUNCH = "launch", "{launch}"
    """What generated code launches: a kernel, a library call, a collective."""


class Item(Frozen):
    """One thing in a layer: its subject, its properties as fields, and the user's line."""

    kind: ItemKind = ItemKind.VALUE
    about: str
    """Items of two ranks about the same thing are compared."""
    fields: dict[str, str] = {}
    """Its properties; compared and hashed."""
    notes: dict[str, str] = {}
    """Parts of the fields, or facts besides them; never compared."""
    line: UserLine | None = None
    callers: tuple[UserLine, ...] | None = None
    """Lines from the compiled frame to the call that `line` is in, outermost first; None where they are not known."""

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for equal items, whatever the order of their fields; a record sent between ranks may change it."""
        return (self.kind, self.about, *(self.fields[name] for name in sorted(self.fields)))

    @property
    def says(self) -> str:
        """The fields as one line, for the reader and for the allow-list."""
        says = self.kind.text.format_map(self.fields)
        is_broadcast = self.kind == ItemKind.COLLECTIVE and self.fields.get("src", "-") != "-"
        return says.replace("(", f"(src={self.fields['src']}, ", 1) if is_broadcast else says

    @property
    def text(self) -> str:
        """The whole item as one line, for the reader and for the allow-list."""
        return f"{self.about} :: {self.says}"


def value_item(about: str, value: str, *, line: UserLine | None = None) -> Item:
    """An item with one value."""
    return Item(about=about, fields={"value": value}, line=line)


class Status(StrEnum):
    """Outcome of one check."""

    PASS = "pass"
    FAIL = "fail"
    INFO = "info"
    SKIPPED = "skipped"
