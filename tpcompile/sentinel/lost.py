"""Ranks that did not answer, and what the others do -> what became of them, and whose fault it is: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Issued, RankState
from tpcompile.sentinel.parting import key_of, usual
from tpcompile.sentinel.waits import last_issued, stuck_in

_RECENT = 12
"""Collectives before an abort in which a rank may have left the common order."""


@dataclass(frozen=True)
class Lost:
    """A rank that did not answer."""

    rank: int
    how: str
    """`died`, `stopped` (SIGSTOP) or `silent`."""
    seen: str = ""
    line: UserLine | None = None
    """Where its main thread was, when it left a black box."""
    stack: tuple[UserLine, ...] = ()
    """The user's frames there, outermost first."""
    aborted: bool = False
    """It ended itself (SIGABRT), as collectives that do not fit make a process do; a crash elsewhere does not."""
    is_final: bool = False
    """It died, or has been stopped or silent for too long."""


def lost_ranks(dead: Sequence[Lost], states: Mapping[int, RankState]) -> Finding:
    """What became of ranks that are given up, while the others are as `states` say."""
    how = "; ".join(f"rank {one.rank} {_HOW[one.how]}{_where(one)}" for one in dead)
    waiting = [state for state in states.values() if stuck_in(state) is not None or state.waits_at is not None]
    if waiting:
        how += f"; rank {ranks_text([state.rank for state in waiting])} waits"
    gone = tuple(one.rank for one in dead)
    aborted = next((one for one in dead if one.line and one.aborted), None)
    if aborted is not None and dead[0].how == "died":
        return replace(_aborted(aborted, states, how), gone=gone)
    cause = Cause.KILLED if dead[0].how == "died" else Cause.STOPPED_RESPONDING
    lines = [one.line for one in dead if one.line] + [state.line for state in waiting if state.line]
    return Finding(cause, how, gone, lines[0] if lines else None, gone=gone)


def _aborted(gone: Lost, states: Mapping[int, RankState], how: str) -> Finding:
    """A rank left its last stack: it aborted in a collective. The others' collectives tell what was wrong with it."""
    known = {rank: stuck_in(state) or last_issued(state) for rank, state in sorted(states.items())}
    newest = {rank: issued for rank, issued in known.items() if issued is not None}
    if not newest:
        return Finding(Cause.KILLED, how, (gone.rank,), gone.line)
    here = [rank for rank, issued in newest.items() if _met(gone, issued)]
    elsewhere = {rank: issued for rank, issued in newest.items() if rank not in here}
    if not elsewhere:
        text = f"{how}; the others issued {newest[here[0]].op} there, too: shapes, dtypes or split sizes differ"
        return Finding(Cause.COLLECTIVE_SIZES, text, (gone.rank,), gone.line)
    strangers = elsewhere if here else _strangers(states, newest)
    if strangers:  # the dead rank did what everybody does, and a rank met it with another collective
        odd, issued = tuple(strangers), next(iter(strangers.values()))
        text = f"{how}; rank {ranks_text(odd)} was in {issued}"
        cause = Cause.CALL_COUNT if _is_a_call_more(issued, states[odd[0]]) else Cause.STUCK_COLLECTIVE
        return Finding(cause, text, odd, issued.call_line or issued.line)
    met = next(iter(newest.values()))
    text = f"{how}; the others were in {met}"
    if met.call_line is not None and _was_there(gone, states):
        text += f", in call {met.call} of {met.region}, which rank {gone.rank} seems to have left out"
        return Finding(Cause.CALL_COUNT, text, (gone.rank,), met.call_line)
    return Finding(Cause.STUCK_COLLECTIVE, text, (gone.rank,), gone.line)


def _is_a_call_more(issued: Issued, state: RankState) -> bool:
    """True where no other call of the region was made from that line."""
    calls = [one for one in state.issued if one.call_line and one.region == issued.region]
    here = {one.call for one in calls if one.call_line == issued.call_line}
    return here == {issued.call} and len({one.call for one in calls}) > 1


def _was_there(gone: Lost, states: Mapping[int, RankState]) -> bool:
    """True when ranks usually come to where the dead rank stood: by a call that it left out, it was there too early."""
    return any(_met(gone, one) and _same(gone.line, one.line) for state in states.values() for one in state.issued)


def _strangers(states: Mapping[int, RankState], newest: Mapping[int, Issued]) -> dict[int, Issued]:
    """Ranks that left their own habit a moment ago, and in what."""
    found = {}
    for rank, last in newest.items():
        of_group = [one for one in states[rank].issued if one.group == last.group]
        strangeness = _strangeness(of_group)
        strangest = max(range(len(of_group)), key=lambda at: (strangeness[at], at))
        if strangeness[strangest]:
            found[rank] = of_group[strangest]
    return found


def _where(gone: Lost) -> str:
    return f" in {gone.line}" if gone.line else f" ({gone.seen})" if gone.seen else ""


def _met(gone: Lost, issued: Issued) -> bool:
    """True when the dead rank stood where this collective was issued."""
    stack = tuple((frame.file, frame.line) for frame in gone.stack)
    place = issued.place
    if not stack or not place:
        return _same(gone.line, issued.line)
    common = min(len(stack), len(place))
    return stack[:common] == place[:common]


def _strangeness(issued: Sequence[Issued]) -> list[int]:
    """How many collectives before each of the last ones are followed by another one elsewhere; 0 for a usual one.

    Elsewhere is before and after: what ends the first step ends the next ones, too.
    """
    keys = [key_of(one) for one in issued]
    found = [0] * len(keys)
    for at in range(max(1, len(keys) - _RECENT), len(keys)):
        context, expected = usual(keys, at, [end for end in range(1, len(keys)) if end != at])
        if expected and keys[at] not in expected:
            found[at] = context
    if not issued[-1].is_done and keys[-1] not in keys[:-1] and len(keys) > 2:
        found[-1] = max(found[-1], 1)
    return found


def _same(a: UserLine | None, b: UserLine | None) -> bool:
    return a is not None and b is not None and (a.file, a.line) == (b.file, b.line)


_HOW = {"died": "is gone: its process died", "stopped": "is stopped (SIGSTOP)", "silent": "does not answer"}
