"""A compile that only some ranks made, of a function that all ranks compile -> whether the call is one of their own.

Rank 0 evaluates, generates samples or checks a batch more often than the others: the same function, called from a
different line. Without a collective no rank waits in such a call, and no number of a different rank depends on it.
"""

from __future__ import annotations

from collections.abc import Collection

from tpcompile.evidence.groups.align import Slot
from tpcompile.evidence.groups.domain import Domain, Seen
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import ItemKind, Layer
from tpcompile.evidence.records.digest import CallPath


def is_own_call(ours: Seen, absent: Collection[int]) -> bool:
    """True where this rank alone calls the function from that line, and calls it also as the absent ranks do.

    In a program that still runs, its call as the absent ranks make it may come later. A rank that calls the function as
    often as the others makes no call of its own: the others did not compile in that line, since what they have fits.
    """
    domain, frame = ours.domain, ours.compile.frame
    path = ours.compile.call_path
    theirs: set[CallPath] = set()
    for rank in absent:
        theirs |= domain.compiled(rank).call_paths.get(frame, set())
    is_own = bool(path) and path not in theirs
    if not theirs or not is_own:
        return False
    if not domain.is_running:
        calls_as_they_do = theirs <= domain.compiled(ours.rank).call_paths[frame]
        if not calls_as_they_do or not _is_called_more(ours, absent):
            return False
    return is_local(ours)


def _is_called_more(ours: Seen, absent: Collection[int]) -> bool:
    """True where this rank called the function more often than any absent rank, or where calls were not counted."""
    domain, place = ours.domain, (ours.compile.phase, ours.compile.frame)
    mine = domain.compiled(ours.rank)
    theirs = [domain.compiled(rank) for rank in absent]
    is_counted = all(one.is_counted for one in (mine, *theirs))
    if not is_counted:
        return True
    most = max(one.num_calls(*place) for one in theirs)
    return mine.num_calls(*place) > most


def are_other_calls(domain: Domain, slot: Slot) -> bool:
    """True for compiles of a program that still runs, which belong to different calls without collectives."""
    paths = slot.compiles.map(lambda compile_: compile_.call_path)
    if not domain.is_running or () in paths.values() or not paths.differ():
        return False
    return all(is_local(Seen(domain, rank, compile_)) for rank, compile_ in slot.compiles.items())


def is_called_elsewhere(ours: Seen, theirs: Seen) -> bool:
    """True where the calls of two compiled functions stand in different functions of the program."""
    mine, other = ours.compile.called_from[-1:], theirs.compile.called_from[-1:]
    places = [(line.file, line.function) for line in (*mine, *other)]
    return len(places) == 2 and places[0] != places[1]


def is_local(seen: Seen) -> bool:
    """True for a complete graph that issues no collective.

    The collectives of a DTensor are seen in lowered graphs only.
    """
    compile_ = seen.compile
    if compile_.limit_reached or compile_.num_items(Layer.COLLECTIVES):
        return False
    program = seen.observed(Layer.GRAPH)
    if not program:
        return False
    kinds = {item.kind for item in program}
    has_eager_code = not kinds.isdisjoint((ItemKind.BREAK, ItemKind.FAILURE))
    if has_eager_code:
        return False
    is_lowered = find(compile_.layers, lambda digest: digest.layer == Layer.LOWERED) is not None
    with_dtensor = find(program, lambda item: "DTensor(" in item.text)
    return is_lowered or with_dtensor is None
