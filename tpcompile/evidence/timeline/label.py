"""Where ranks parted -> the cause, one sentence, the ranks and the line: one row for each kind of parting. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.evidence.timeline.parting import Edit, Parting, Why
from tpcompile.evidence.timeline.stream import Event, How, Kind


class Row(NamedTuple):
    """What is said of one kind of parting."""

    edit: Edit
    kind: Kind | None
    """Kind of the event at which the ranks parted, CALL also for a collective that the call issues; None for any."""
    cause: Cause
    says: str
    """`{odd}` are the ranks to blame, `{did}` what they did; `{others}` and `{usual}` the other ranks, and theirs."""


_LEFT_OUT, _ADDED = "{odd} left out {usual}{like}; {odd} {did}", "{odd} {did}{alone}; {others} {usual_did}"
_INSTEAD, _ENDED = "{odd} {did}, where {others} {usual_did}", "{odd} {did}, before {usual}{like}"
_CONTENT, _SIDES = "{fields} differ: {odd} {did}; {others} {usual_did}", "{sides}"
ROWS = (
    Row(Edit.LEFT_OUT, Kind.CALL, Cause.CALL_COUNT, _LEFT_OUT),
    Row(Edit.LEFT_OUT, None, Cause.STUCK_COLLECTIVE, _LEFT_OUT),
    Row(Edit.ADDED, Kind.CALL, Cause.CALL_COUNT, _ADDED),
    Row(Edit.ADDED, None, Cause.STUCK_COLLECTIVE, _ADDED),
    Row(Edit.INSTEAD, Kind.CALL, Cause.CALL_COUNT, _INSTEAD),
    Row(Edit.INSTEAD, None, Cause.STUCK_COLLECTIVE, _INSTEAD),
    Row(Edit.ENDED, Kind.CALL, Cause.CALL_COUNT, _ENDED),
    Row(Edit.ENDED, None, Cause.STUCK_COLLECTIVE, _ENDED),
    Row(Edit.CONTENT, Kind.CALL, Cause.WRONG_VARIANT, _CONTENT),
    Row(Edit.CONTENT, None, Cause.COLLECTIVE_SIZES, _CONTENT),
    Row(Edit.UNDECIDED, Kind.CALL, Cause.CALL_COUNT, _SIDES),
    Row(Edit.UNDECIDED, None, Cause.STUCK_COLLECTIVE, _SIDES),
)
"""The first row that fits counts."""
_VERBS = {
    Kind.ITERATION: "began",
    Kind.CALL: "made",
    Kind.COMPILE: "compiled",
    Kind.COLLECTIVE: "issued",
    Kind.SEND: "is in",
    Kind.RECEIVE: "is in",
    Kind.BREAK: "had",
}


@dataclass(frozen=True)
class Label:
    """A parting in the words of a finding."""

    cause: Cause
    says: str
    ranks: tuple[int, ...]
    """Ranks to blame; all that parted where nobody is."""
    line: UserLine | None


def label(parting: Parting) -> Label:
    """The row for a parting, filled in."""
    edit = Edit.CONTENT if parting.fields and not parting.odd else parting.edit
    kind = _kind(parting)
    row = next(row for row in ROWS if row.edit == edit and row.kind in (kind, None))
    everyone = tuple(sorted(parting.starts))
    odd_side = parting.odd_side
    is_content = edit == Edit.CONTENT
    usual = _usual(parting, is_content=is_content)
    side = parting.usual_side
    theirs = usual if is_content or side is None else side.event
    fields = parting.fields
    is_told = parting.line is not None and parting.line in (*usual.stack, *odd_side.event.stack[-1:])
    text = row.says.format(
        odd=named_ranks(parting.odd or odd_side.ranks),
        did=did(odd_side.compared if is_content else odd_side.event, fields),
        others=named_ranks(_others(parting)) if _others(parting) else "the other ranks",
        usual=event_text(usual, fields),
        usual_did=did(theirs, fields),
        like=_reason(parting),
        alone="" if is_told or parting.line is None else f", from {parting.line}",
        fields=" and ".join(fields) or "contents",
        sides="; ".join(f"{named_ranks(one.ranks)} {did(one.event, fields)}" for one in parting.sides),
    )
    return Label(row.cause, text, parting.odd or everyone, parting.line)


def did(event: Event, fields: Collection[str] = ()) -> str:
    """What a rank did, as the end of `rank 1 ...`; `fields` of it differ."""
    if event.kind == Kind.END:
        return f"has {event.name}" if event.name in ("finished", "raised", "exited", "aborted") else "was killed"
    return f"{_VERBS[event.kind]} {event_text(event, fields)}"


def event_text(event: Event, fields: Collection[str] = ()) -> str:
    """`all_reduce #9 4x4 of group '0 default_pg' at train.py:12 in step`, with its dtypes where these differ."""
    at = f" at {event.stack[-1]}" if event.stack else ""
    number = f" #{event.number}" if event.number else ""
    if event.kind == Kind.CALL:
        return f"call {event.number} of {event.name}{at}"
    if event.peer is not None:
        return f"{event.kind} {'to' if event.kind == Kind.SEND else 'from'} rank {event.peer}{at}"
    if event.kind == Kind.COLLECTIVE:
        content = {**event.content, **event.own}
        shown = ["sizes", "dtypes"] if "dtypes" in fields else ["sizes"]
        sizes = "".join(f" {content[name]}" for name in shown if content.get(name))
        in_call = f" in call {event.call} of {event.region}" if event.call else ""
        return f"{event.name}{number}{sizes} of group {event.group!r}{at}{in_call}"
    return f"{event.name or event.kind}{number}{at}"


def _usual(parting: Parting, *, is_content: bool = False) -> Event:
    """What the other ranks did there, or what was due."""
    side = parting.usual_side
    if side is not None and is_content:
        return side.compared
    return parting.usual or parting.sides[0].event


def _others(parting: Parting) -> tuple[int, ...]:
    odd = parting.odd or parting.odd_side.ranks
    return tuple(sorted(rank for rank in parting.starts if rank not in odd))


def _reason(parting: Parting) -> str:
    """Why that was due, where no rank is seen to do it."""
    usual = parting.usual_side
    if usual is not None and usual.event.peer is not None:
        return f", while {named_ranks(usual.ranks)} {did(usual.event)}"
    if usual is not None:
        return f", which {named_ranks(usual.ranks)} {did(usual.event).split(' ', 1)[0]}"
    return ", as in earlier steps" if parting.why == Why.OWN_PAST else ""


def _kind(parting: Parting) -> Kind:
    """Kind of the event at which the ranks parted: CALL where they did at a call of compiled code, or above one."""
    lacks_it = parting.edit in (Edit.LEFT_OUT, Edit.ENDED)
    event = _usual(parting) if lacks_it else parting.odd_side.event
    has_failed = parting.edit == Edit.ENDED and parting.odd_side.event.name != How.FINISHED
    is_in_call = parting.line in event.stack[: event.call_depth] and not parting.fields
    if has_failed:  # it did not leave the call out: it raised, or was killed
        return Kind.END
    return Kind.CALL if is_in_call else event.kind
