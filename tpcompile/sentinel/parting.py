"""What the ranks issued, number by number -> where they parted, which rank left the common order, and in what: pure.

Collectives of a group carry numbers, so ranks that run the same program issue the same under each number, from the same
lines. Where they do not, the rank to blame is the one that left its own habit: after what it issued before, something
else used to follow. A collective from a line that no other rank uses was added; one that used to follow was left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import FINISHED, Issued, RankState
from tpcompile.sentinel.waits import last_issued

Place = tuple[tuple[str, int], ...]
Key = tuple[str, Place]
_KEPT = 1 << 20


def key_of(issued: Issued) -> Key:
    """What is equal on ranks that run the same program: op, and the lines it is issued from."""
    return issued.what, tuple((frame.file, frame.line) for frame in reversed(_frames(issued)))


def parting(states: Mapping[int, RankState]) -> Finding | None:
    """Where the ranks parted, None when what they issued under common numbers is alike."""
    for group in sorted({issued.group for state in states.values() for issued in state.issued}):
        by_rank = {rank: _of_group(state, group) for rank, state in sorted(states.items())}
        taking_part = {rank: issued for rank, issued in by_rank.items() if issued}
        found = _parting_of_group(taking_part) if len(taking_part) > 1 else None
        if found is not None:
            return found
    return None


def usual(keys: Sequence[Key], at: int, ends: Iterable[int]) -> tuple[int, frozenset[Key]]:
    """What followed the collectives before number `at` elsewhere, at `ends`: those that most of them came before.

    Returns how many those are, and what followed; nothing where the last of them is new.
    """
    contexts = {end: _common_before(keys, at, end) for end in ends}
    longest = max(contexts.values(), default=0)
    if longest == 0:
        return 0, frozenset()
    return longest, frozenset(keys[end] for end, length in contexts.items() if length == longest)


def _common_before(keys: Sequence[Key], at: int, end: int) -> int:
    """How many collectives before two places are the same."""
    length = 0
    while length < min(at, end) and keys[at - 1 - length] == keys[end - 1 - length]:
        length += 1
    return length


def fewer_calls(states: Mapping[int, RankState], waiting: RankState, absent: RankState) -> Finding | None:
    """A rank waits for one that has made fewer calls, although nothing else differs."""
    regions = [region for region, calls in waiting.calls.items() if absent.calls.get(region, 0) < calls]
    if not regions:
        return _fewer_collectives(waiting, absent)
    stuck = next((issued for issued in reversed(waiting.issued) if not issued.is_done), None)
    region = stuck.region if stuck is not None and stuck.region in regions else regions[0]
    called = [issued.call_line for issued in waiting.issued if issued.region == region and issued.call_line]
    line = called[-1] if called else waiting.line
    made = _calls_made(states, region)
    left = f"; rank {absent.rank} has left: {absent.ended}" if absent.ended else ""
    observed = f"the ranks made different numbers of calls of {region}: {made}{left}"
    return Finding(Cause.CALL_COUNT, observed, (absent.rank,), line)


def _fewer_collectives(waiting: RankState, absent: RankState) -> Finding | None:
    """The same where nobody knows the calls: it ended well before the last collective of the rank that waits."""
    newest = last_issued(waiting)
    if newest is None or newest.call_line is None or absent.ended != FINISHED:
        return None
    last = max(_of_group(absent, newest.group), default=0)
    if not 0 < last < newest.seq:
        return None
    observed = f"rank {absent.rank} has left after {last} collectives of group {newest.group!r}, before {newest}"
    return Finding(Cause.CALL_COUNT, observed, (absent.rank,), newest.call_line)


def _of_group(state: RankState, group: str) -> dict[int, Issued]:
    return {issued.seq: issued for issued in state.issued if issued.group == group}


def _parting_of_group(by_rank: Mapping[int, Mapping[int, Issued]]) -> Finding | None:
    differing = list(_differing(by_rank))
    if differing and differing[0] == _oldest_common(by_rank) > 1:
        return None  # they parted before: what comes under one number since then is shifted
    for number in differing:
        odd = _unusual(by_rank, number) or _alone(by_rank, number, at_most=1)
        if odd:
            return _describe(by_rank, number, odd)
    first = _first_unlike(by_rank, differing)
    if first is None:
        return None
    return _describe(by_rank, first, _alone(by_rank, first) or _minority(by_rank, first))


def _oldest_common(by_rank: Mapping[int, Mapping[int, Issued]]) -> int:
    """The first number that more than one rank still knows."""
    known = Counter(number for issued in by_rank.values() for number in issued)
    return min((number for number, ranks in known.items() if ranks > 1), default=0)


def _differing(by_rank: Mapping[int, Mapping[int, Issued]]) -> Iterator[int]:
    """Numbers under which more than one rank issued something, and not the same."""
    for number in sorted(set().union(*by_rank.values())):
        having = [issued[number] for issued in by_rank.values() if number in issued]
        keys = {key_of(issued) for issued in having}
        if len(keys) > 1 and not _is_one_call(having):
            yield number


def _is_one_call(having: Sequence[Issued]) -> bool:
    """True where ranks issued the same in one call from one line, compiled on some and eager on others: no parting.

    Compiled code stands at the first line of its function, whatever line of it issues a collective.
    """
    calls = {(issued.what, issued.region, issued.call, issued.call_line) for issued in having}
    is_compiled = any(issued.line and issued.region.endswith(f":{issued.line.line}") for issued in having)
    return len(calls) == 1 and is_compiled


def _unusual(by_rank: Mapping[int, Mapping[int, Issued]], number: int) -> tuple[int, ...]:
    """Ranks that issued under this number what did not use to follow, where another rank did as usual."""
    having = {rank: issued for rank, issued in by_rank.items() if number in issued}
    usual = {rank: _is_usual(issued, number) for rank, issued in having.items()}
    odd = tuple(rank for rank, is_usual in usual.items() if is_usual is False)
    return odd if len(odd) < len(having) else ()


def _alone(by_rank: Mapping[int, Mapping[int, Issued]], number: int, *, at_most: int = _KEPT) -> tuple[int, ...]:
    """Ranks that issued it from a line of their own, and so often at most, where another rank did not."""
    having = {rank: issued for rank, issued in by_rank.items() if number in issued}
    alone = []
    for rank, issued in having.items():
        times = sum(key_of(one) == key_of(issued[number]) for one in issued.values())
        if times <= at_most and _own_frames(having, number, rank):
            alone.append(rank)
    return tuple(alone) if len(alone) < len(having) else ()


def _is_usual(issued: Mapping[int, Issued], number: int) -> bool | None:
    """True when the rank did as it used to, None when there is nothing to compare with."""
    keys = [key_of(issued[seq]) for seq in sorted(issued) if seq <= number]
    here = len(keys) - 1
    _, expected = usual(keys, here, range(here))
    return keys[here] in expected if expected else None


def _own_frames(having: Mapping[int, Mapping[int, Issued]], number: int, rank: int) -> list[UserLine]:
    """Lines of a rank's collective that no other rank has issued anything from, innermost first."""
    others = {
        (frame.file, frame.line)
        for other, issued in having.items()
        for one in (issued.values() if other != rank else ())
        for frame in _frames(one)
    }
    stack = _frames(having[rank][number])
    return [frame for frame in stack if (frame.file, frame.line) not in others]


def _frames(issued: Issued) -> tuple[UserLine, ...]:
    return issued.stack or ((issued.line,) if issued.line else ())


def _first_unlike(by_rank: Mapping[int, Mapping[int, Issued]], differing: Sequence[int]) -> int | None:
    """Branches may call one collective from two lines at every step; a pair of lines that was met once says more."""
    pairs = {
        number: tuple(key_of(issued[number]) if number in issued else None for issued in by_rank.values())
        for number in differing
    }
    met = list(pairs.values())
    once = [number for number in differing if met.count(pairs[number]) == 1]
    return next(iter(once or differing), None)


def _minority(by_rank: Mapping[int, Mapping[int, Issued]], number: int) -> tuple[int, ...]:
    """Ranks beside the largest group that did the same; of equal groups the one with the lowest rank is not blamed."""
    groups: dict[Key, list[int]] = {}
    for rank, issued in sorted(by_rank.items()):
        if number in issued:
            groups.setdefault(key_of(issued[number]), []).append(rank)
    largest = max(groups.values(), key=len)
    return tuple(sorted(rank for ranks in groups.values() if ranks is not largest for rank in ranks))


def _describe(by_rank: Mapping[int, Mapping[int, Issued]], number: int, odd: tuple[int, ...]) -> Finding:
    having = {rank: issued for rank, issued in by_rank.items() if number in issued}
    others = [rank for rank in having if rank not in odd]
    theirs, usual = having[odd[0]][number], having[others[0]][number]
    own = _own_frames(having, number, odd[0])
    if own:
        says = f"rank {ranks_text(odd)} issued {theirs}, which no other rank does; rank {ranks_text(others)} {usual}"
        cause = Cause.CALL_COUNT if _is_a_call(theirs, own[0]) else Cause.STUCK_COLLECTIVE
        return Finding(cause, says, odd, own[0])
    says = (
        f"rank {ranks_text(odd)} left out {usual}{_call_text(usual)}, and issued {theirs}{_call_text(theirs)} instead"
    )
    cause = Cause.CALL_COUNT if usual.call_line else Cause.STUCK_COLLECTIVE
    return Finding(cause, says, odd, usual.call_line or theirs.call_line or usual.line)


def _is_a_call(issued: Issued, own: UserLine) -> bool:
    """True when the line of its own calls compiled code: the collective itself is everybody's."""
    line = issued.call_line
    return line is not None and (line.file, line.line) == (own.file, own.line)


def _call_text(issued: Issued) -> str:
    return f" in its call {issued.call} of {issued.region}" if issued.region else ""


def _calls_made(states: Mapping[int, RankState], region: str) -> str:
    return ", ".join(f"rank {rank} {state.calls.get(region, 0)}" for rank, state in sorted(states.items()))
