"""What each rank executed -> the branch at which the ranks parted, what each did there, and who left the common way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tpcompile.evidence.iterables import differ, first, grouped, majority
from tpcompile.evidence.records.base import UserLine
from tpcompile.evidence.records.findings import Parted, Went
from tpcompile.evidence.timeline import source
from tpcompile.evidence.timeline.before import UnlikeBefore, unlike_before
from tpcompile.evidence.timeline.branch_past import FEW_TOLD, way_due, ways_before
from tpcompile.evidence.timeline.flow import EXACT, Flow, Kind, texts_of, value_text
from tpcompile.evidence.timeline.given import texts_of_program, values_read
from tpcompile.evidence.timeline.leaving import by_taker, is_not_caught
from tpcompile.evidence.timeline.pair import Counts, Pair
from tpcompile.evidence.timeline.reasons import Reasons
from tpcompile.evidence.timeline.values import Key, Scopes, Unlike, compared
from tpcompile.evidence.timeline.walk import Fork, Step, Walks, common_start, forks, is_line, kind_of, place_of

_SHOWN = 4
"""Functions that are named of the way of a rank."""
_MAX_S = 6.0
"""Limit for walking all ranks beside the first one: the ones looked at until then are compared."""


def parted(
    flows: Mapping[int, Flow],
    readable: Collection[str] = (),
    named: Collection[str] = (),
    *,
    is_same_program: bool = True,
    is_of_sizes: bool = False,
    is_of_values: bool = False,
    over: Collection[int] = (),
    alike: Sequence[Sequence[int]] = (),
) -> Parted | None:
    """The branch at which the ranks parted, or the line that set a value apart; None when none counts.

    `readable` are the files that may be opened: those that this process runs itself, as a peer could name any other.
    `named` are the words of what is known already: a guard names a variable. Ranks of different domains need not run
    the same program. `is_of_sizes` where it is the sizes of a message that differ, `is_of_values` where it is a value
    that nothing else is known of: what a rank set differently is a reason then. The ranks that are `over` are known
    to have left out what the others did after their last step. Ranks that are `alike` are known to have done the same:
    what tells them apart, too, is not the reason.
    Raises ValueError for a flow that cannot be read.
    """
    usable = {rank: flow for rank, flow in sorted(flows.items()) if flow.packed}
    if len(usable) < 2:
        return _named_before(flows, named)
    kind = is_same_program, is_of_sizes, is_of_values
    found, is_known = _parted_in(usable, readable, named, *kind, over, alike)
    setup = {rank: flow.of_setup() for rank, flow in usable.items()}
    if is_known or setup == usable or not all(flow.packed for flow in setup.values()):
        return found
    at_first, is_known = _parted_in(setup, readable, named, *kind, (), alike)
    return at_first if is_known else found


def _parted_in(
    usable: Mapping[int, Flow], readable: Collection[str], named: Collection[str], is_same_program: bool,
    is_of_sizes: bool, is_of_values: bool, over: Collection[int], alike: Sequence[Sequence[int]],
) -> tuple[Parted | None, bool]:  # fmt: skip
    """Where they parted, and whether it is among these steps that what differs comes from."""
    numbered = Walks.of(usable)
    are_whole = all(flow.num_before == 0 for flow in usable.values())
    like_base = max(alike, key=len, default=())
    base = next((rank for rank in usable if rank in like_base), min(usable))
    walks = numbered.without_numbers()
    before = unlike_before(usable, walks.codes) if is_same_program else []  # else they differ by their roles
    pairs: list[Pair] = []
    ends_s = time.monotonic() + _MAX_S
    for rank in usable:
        if time.monotonic() > ends_s:
            break
        begin = common_start(numbered.steps[base], numbered.steps[rank], are_whole=are_whole)
        if rank != base and begin is not None:
            pairs.append(_pair(walks, base, rank, begin, readable, before, over, is_same_program=is_same_program))
    pairs, outside = _without_what_is_harmless(pairs, like_base)
    if is_of_values and len(outside) < len(pairs):
        outside = [replace(pair, has_witness=True) for pair in outside]
    earliest = _earliest(outside, named, is_of_sizes=is_of_sizes)
    if earliest is not None and isinstance(earliest.origin, Unlike):
        shared = _earliest(_without_own(outside), named, is_of_sizes=is_of_sizes)
        earliest = shared if shared is not None and isinstance(shared.origin, Unlike) else earliest
    if earliest is None:
        return None, False
    origin, last = earliest.origin, earliest.last
    if isinstance(origin, UnlikeBefore):
        known = _set_before(origin)
    elif isinstance(origin, Unlike):
        known = _set_apart(walks, base, origin, pairs, named)
    else:
        known = _at_branch(walks, base, origin, pairs, readable, is_uneven=earliest.is_uneven)
    led_to = None if last is None else user_line(walks, *(last.place if isinstance(last, Unlike) else last.branch))
    if led_to == known.line:
        led_to = None
    ends: dict[str, Any] = {
        "led_to": led_to, "is_uneven": earliest.is_uneven, "is_habit": earliest.is_habit,
        "is_linked": earliest.is_linked, "is_recent": earliest.is_recent,
    }  # fmt: skip
    if alike:
        ends["odd"] = _outside(dict(enumerate(alike)), majority(alike))
    return known.model_copy(update=ends), earliest.is_linked and not isinstance(origin, UnlikeBefore)


def _pair(
    walks: Walks, base: int, rank: int, begin: tuple[int, int], readable: Collection[str],
    set_before: Sequence[UnlikeBefore], over: Collection[int], *, is_same_program: bool,
) -> Pair:  # fmt: skip
    """The rank beside the first one, from the steps on at which they are together."""
    scopes = Scopes(walks.codes)
    parted_at = forks(walks.steps[base], walks.steps[rank], begin, are_over=(base in over, rank in over))
    found = [by_taker(fork, walks, readable) for fork in parted_at]
    values = compared(walks, scopes, base, rank, found, begin, readable=readable)
    before = [one for one in set_before if one.by_rank[base] != one.by_rank[rank]]
    reasons = Reasons(walks, scopes, base, rank, frozenset(readable), found, values, is_same_program)
    return Pair(reasons, before)


def _without_what_is_harmless(pairs: Sequence[Pair], like_base: Collection[int]) -> tuple[list[Pair], list[Pair]]:
    """All pairs, and those of ranks that are not known to have done the same as the first one.

    What tells the first rank apart from one that did the same is no reason.
    """
    within = [pair for pair in pairs if pair.reasons.rank in like_base]
    harmless = frozenset((fork.branch, fork.starts[0]) for pair in within for fork in pair.reasons.forks)
    own = frozenset(key for pair in within for key, unlike in pair.reasons.values.found.items() if unlike is not None)
    outside = [
        replace(
            pair,
            harmless=harmless,
            reasons=replace(pair.reasons, values=pair.reasons.values.without(own)),
        )
        for pair in pairs
        if pair.reasons.rank not in like_base
    ]
    return [*within, *outside], outside


def _without_own(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs without the values of which each rank has one of its own, as the name of its folder.

    They are a reason only where no value is one that tells some ranks from others.
    """
    found = [pair.reasons.values.found for pair in pairs]
    shared = set(found[0]).intersection(*found[1:]) if len(found) > 1 else set[Key]()
    own = frozenset(key for key in shared if _are_all_different([values[key] for values in found]))
    if not own:
        return list(pairs)
    return [replace(pair, reasons=replace(pair.reasons, values=pair.reasons.values.without(own))) for pair in pairs]


def _are_all_different(values: Sequence[Unlike | None]) -> bool:
    theirs = {unlike.theirs for unlike in values if unlike is not None}
    return len(theirs) == len(values) > 1


def _earliest(pairs: Sequence[Pair], named: Collection[str], *, is_of_sizes: bool) -> Counts | None:
    """The earliest of what counts most."""
    counting = [counts for pair in pairs if (counts := pair.that_counts(named, is_of_sizes=is_of_sizes)) is not None]
    weights = [counts.weight(is_of_sizes=is_of_sizes) for counts in counting]
    most = [counts for counts, weight in zip(counting, weights, strict=True) if weight == max(weights)]
    return min(most, key=lambda counts: counts.start, default=None)


def _at_branch(
    walks: Walks, base: int, origin: Fork, pairs: Sequence[Pair], readable: Collection[str], *, is_uneven: bool
) -> Parted:
    """What all ranks did at the branch."""
    by_rank = {pair.reasons.rank: pair for pair in pairs}
    at_branch = {
        rank: [fork for fork in pair.reasons.forks if fork.branch == origin.branch] for rank, pair in by_rank.items()
    }
    here = {
        rank: first(fork for fork in passed if fork.starts[0] == origin.starts[0]) for rank, passed in at_branch.items()
    }
    # a rank that went another way there before has a part of its own in the program, and no vote
    apart = {rank for rank, fork in here.items() if fork is not None and fork is not at_branch[rank][0]}
    there = {rank: fork for rank, fork in here.items() if fork is not None}
    without = apart if apart < there.keys() else set()
    earlier = [fork for rank, passed in at_branch.items() if rank not in without for fork in passed]
    # Ranks that part again before they issue a collective do so by the items of a list, which have no past.
    is_of_items = any(len(passed) > len(by_rank[rank].apart(passed)) for rank, passed in at_branch.items())
    passes = _Passes(earlier, is_of_items=is_of_items, is_uneven=is_uneven)
    known = _parted(walks, base, origin, there, passes, readable, without=without)
    is_own_data = any(by_rank[rank].reads_own_data(fork) for rank, fork in there.items())
    if is_own_data and majority([side.ranks for side in known.sides]) is None:
        known = known.model_copy(update={"odd": ()})
    return known


class _Passes(NamedTuple):
    """Of the branch at which ranks parted."""

    forks: Collection[Fork]
    """All at this branch."""
    is_of_items: bool
    """They part by the items of a list, each of which is another one."""
    is_uneven: bool
    """A rank issued more than the others: the pass was out of the ordinary."""


def _parted(
    walks: Walks,
    base: int,
    fork: Fork,
    there: Mapping[int, Fork],
    passes: _Passes,
    readable: Collection[str],
    *,
    without: Collection[int] = (),
) -> Parted:
    """The ways of all ranks but some at a branch, or at the head of a loop."""
    steps = walks.steps[base]
    own_way = steps[fork.starts[0] : fork.ends[0]]
    ways = {rank: own_way for rank in walks.steps if rank not in without}
    for rank, one in there.items():
        if rank in without:
            continue
        ways[rank] = walks.steps[rank][one.starts[1] : one.ends[1]]
    # A rank that makes no step of its own left out what the other one did: it goes on where they are together again.
    after = steps[fork.ends[0] : fork.ends[0] + 1]
    firsts = {rank: first([*way, *after]) for rank, way in ways.items()}
    sides = grouped(firsts, lambda rank: firsts[rank])
    leaders = [base if base in ranks else ranks[0] for ranks in sides.values()]
    starts = {rank: there[rank].starts[1] if rank in there else fork.starts[0] for rank in leaders}
    values = values_read(walks, Scopes(walks.codes), readable, fork.branch, starts)
    code, line = fork.branch
    before = ways_before(fork, steps, {one.starts[0] for one in passes.forks})
    # Nothing foretells the end of a loop that went on so far: one rank has fewer items, or the other more. Nor do a few
    # items foretell what the next one is like.
    file = walks.codes[code].file
    is_told = not passes.is_of_items and (differ(before) or not source.may_end_loop(file, line, readable))
    is_told &= passes.is_uneven or len(before) > FEW_TOLD or not source.reads_item(file, line, readable)
    went = tuple(
        side_of(walks, ranks, firsts[rank], ways[rank], fork, given=values.get(rank, "")).model_copy(
            update={"how": "raises", "line": None} if is_not_caught(walks, rank, starts[rank], readable) else {}
        )
        for rank, ranks in zip(leaders, sides.values(), strict=True)
    )
    # What raised on some ranks is no branch: the `except` decides what becomes of it.
    handling = [side.line for side in went if side.line and source.is_handler(side.line.file, side.line.line, readable)]
    return Parted(
        line=handling[0] if handling else user_line(walks, code, line),
        times=max(0, sum(is_line(step) and place_of(step) == fork.branch for step in steps[: fork.starts[0]]) - 1),
        sides=went,
        odd=_odd(sides, before if is_told else []),
    )


def _named_before(flows: Mapping[int, Flow], named: Collection[str]) -> Parted | None:
    """Where no steps were recorded: of what was set before, the first variable whose name is known already."""
    wanted = {name for word in named for name in (word, f".{word}")}
    unlike = unlike_before(flows, ()) if len(flows) > 1 else []
    found = first(one for one in unlike if one.names & wanted)
    return _set_before(found).model_copy(update={"is_uneven": False}) if found is not None else None


def _set_before(origin: UnlikeBefore) -> Parted:
    """The line that gave a variable different values, before the recording began."""
    here, values = origin.here, origin.by_rank
    line = UserLine(file=here.file, line=here.line, function=here.function)
    sides = grouped(values, lambda rank: values[rank])
    return Parted(
        line=line,
        times=0,
        sides=tuple(
            Went(ranks=tuple(ranks), how="value", line=line, value=_set_text(here.name, value))
            for value, ranks in sides.items()
        ),
        odd=_outside(sides, majority(sides.values())),
    )


def _set_text(name: str, value: str, *, is_passed: bool = False) -> str:
    """`sets slots = 8`, `passes slots = 8`, or `returns 8`; of a value that is not shown, that each has its own."""
    if is_passed:
        return f"passes {name} = {value}" if value else f"passes a {name} of its own"
    if name:
        return f"sets {name} = {value}" if value else f"sets {name} to a value of its own"
    return f"returns {value or 'a value of its own'}"


def _says(origin: Unlike, text: str) -> str:
    """What a rank gave the variable, or how long the list is that it gave it."""
    if origin.yielded_at is not None:
        return f"yields {text or 'a value of its own'}"
    is_passed = origin.given_at is not None
    if not origin.is_length:
        return _set_text(origin.name, text, is_passed=is_passed)
    name = f"len({origin.name})" if origin.name else ""
    return _set_text(name, text if name else f"{text} items", is_passed=is_passed)


def _set_beside(origin: Unlike, pairs: Sequence[Pair], texts: Mapping[int, str]) -> dict[int, str]:
    """Value of the origin -> `, name = 'quality'`: what else the line set differently there."""
    told: dict[int, str] = {}
    for pair in pairs:
        apart = pair.reasons.values.beside(origin)
        if apart is None:
            continue
        for one in pair.reasons.values.found.values():
            if one is None or one.set_at != origin.set_at or one.name == origin.name:
                continue
            mine, theirs = value_text(one.mine, texts, one.nears[0]), value_text(one.theirs, texts, one.nears[1])
            if mine and theirs:
                told.setdefault(apart.mine, f", {one.name} = {mine}")
                told.setdefault(apart.theirs, f", {one.name} = {theirs}")
    return told


def _set_apart(walks: Walks, base: int, origin: Unlike, pairs: Sequence[Pair], said: Collection[str]) -> Parted:
    """The line that gave the ranks different values; texts that are `said` already may be shown."""
    values = {base: origin.mine}
    nears = {origin.mine: origin.nears[0]}
    for pair in pairs:
        unlike = pair.reasons.values.beside(origin)
        if unlike is not None:
            values[pair.reasons.rank] = unlike.theirs
            nears[unlike.theirs] = unlike.nears[1]
    sides = grouped(values, lambda rank: values[rank])
    earlier = [
        one
        for one in walks.values[base]
        if (one.place, one.name) == (origin.place, origin.name) and one.set_at < origin.set_at
    ]
    always = {EXACT | (one.length or 0) if origin.is_length else one.known for one in earlier}
    texts = texts_of_program(walks, pairs[0].reasons.readable) | texts_of(said)
    beside = _set_beside(origin, pairs, texts)
    # A value that changed before says nothing: each parameter of a loop over them is one that was there before.
    as_before = sides.get(always.pop()) if len(always) == 1 else None
    code, number = origin.given_at or origin.yielded_at or origin.place
    if walks.codes[code].file in pairs[0].reasons.readable:
        number = source.made_at(walks.codes[code].file, number)
    line = user_line(walks, code, number)
    says = {value: _says(origin, value_text(value, texts, nears[value])) for value in sides}
    return Parted(
        line=line,
        times=len(earlier),
        sides=tuple(
            Went(ranks=tuple(ranks), how="value", line=line, value=f"{says[value]}{beside.get(value, '')}")
            for value, ranks in sides.items()
        ),
        odd=_outside(sides, majority(sides.values()) or as_before),
    )


def _outside(sides: Mapping[Any, Sequence[int]], usual: Sequence[int] | None) -> tuple[int, ...]:
    """The ranks of the other sides; nobody where none of them is the usual one."""
    return tuple(sorted(rank for ranks in sides.values() if usual is not None and ranks is not usual for rank in ranks))


def _odd(sides: Mapping[Step | None, Sequence[int]], before: Sequence[Step]) -> tuple[int, ...]:
    """The ranks outside of a majority; else those that went another way than the common past makes likely.

    `before` are the ways that all went at the branch.
    """
    most = majority(sides.values())
    due = way_due(before, sides) if most is None else None
    return _outside(sides, most or (sides.get(due) if due is not None else None))


def side_of(
    walks: Walks, ranks: Sequence[int], step: Step | None, way: Sequence[Step], fork: Fork, *, given: str = ""
) -> Went:
    """What ranks did that took that step, and then the rest of the way, at a fork."""
    names = [walks.codes[place_of(one)[0]].function for one in way[1:] if kind_of(one) is Kind.START]
    called = [f"{name} x{count}" if count > 1 else name for name, count in list(Counter(names).items())[:_SHOWN]]
    went = Went(ranks=tuple(sorted(ranks)), calls=tuple(called), given=given)
    if step is None:
        return went.model_copy(update={"how": "ends"})
    kind, (code, line) = kind_of(step), place_of(step)
    if kind is Kind.RETURN:
        code, line = fork.frames[-2] if len(fork.frames) > 1 else (code, 0)
    how = {Kind.LINE: "line", Kind.START: "enters", Kind.RETURN: "returns", Kind.MARK: "region"}[kind]
    return went.model_copy(update={"how": how, "line": user_line(walks, code, line)})


def user_line(walks: Walks, code: int, line: int) -> UserLine:
    found = walks.codes[code]
    return UserLine(file=found.file, line=line, function=found.function)
