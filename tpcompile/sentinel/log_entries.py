"""Entries of the log that every listener follows: frozen records, one for each kind."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.bounds import Number, Rank
from tpcompile.sentinel.agreement import Span
from tpcompile.sentinel.events import Alarm
from tpcompile.sentinel.messages import Announcement, Position, RankState


class _Entry(Frozen):
    rank: Rank
    """The rank that appended it."""

    @model_validator(mode="after")
    def _is_about_its_rank(self) -> Self:
        ranks = {getattr(value, "rank", self.rank) for _, value in self}
        if ranks != {self.rank}:
            raise ValueError(f"of rank {self.rank} about ranks {sorted(ranks)}")
        return self


class CompileBegins(_Entry):
    """A rank begins to compile, the first one at its position."""

    kind: Literal["compile"] = "compile"
    announcement: Announcement


class Passed(_Entry):
    """A rank has passed a position at which a different rank compiles."""

    kind: Literal["passed"] = "passed"
    position: Position
    state: RankState


class Settled(_Entry):
    """All ranks agree on a position, or have settled that they continue."""

    kind: Literal["decided"] = "decided"
    position: Position


class Ask(_Entry):
    """A rank asks for the state of all ranks."""

    kind: Literal["ask"] = "ask"
    number: Number


class AskValues(_Entry):
    """A rank asks for the values of all ranks in a span."""

    kind: Literal["values"] = "values"
    number: Number
    span: Span


class Left(_Entry):
    """These ranks have closed their sentinels: all that have so far."""

    kind: Literal["left"] = "left"
    ranks: Annotated[str, Field(max_length=1 << 16)]
    """As text, `0-6`; what each of them did last is under `left/<rank>`."""


class Raised(_Entry):
    """A rank raises an alarm."""

    kind: Literal["alarm"] = "alarm"
    alarm: Alarm


class Degraded(_Entry):
    """A rank has stopped watching."""

    kind: Literal["degraded"] = "degraded"
    why: str


Entry = CompileBegins | Passed | Settled | Ask | AskValues | Left | Raised | Degraded
AnyEntry = Annotated[Entry, Field(discriminator="kind")]
