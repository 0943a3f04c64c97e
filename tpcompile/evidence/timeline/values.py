"""Two ranks that execute the same steps -> the values that they set, and which of these differ as never before."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tpcompile.evidence.iterables import differ, grouped
from tpcompile.evidence.timeline.flow import EXACT, Code
from tpcompile.evidence.timeline.source import parts_by_rank, speaks_of_rank
from tpcompile.evidence.timeline.walk import Fork, Place, Step, Value, Walks

_EQUAL = 3
"""Equal values before one that differs, or as many as differ: of data, one is equal by chance."""
Key = tuple[int, str]
"""(index of a step, name that it sets, as `Scopes` has it)."""


class Unlike(NamedTuple):
    """A value that differs between two ranks."""

    known_at: int
    """How many steps the first rank had made when it was known."""
    set_at: int
    """Index of its step that set it."""
    place: Place
    name: str
    mine: int
    theirs: int
    key: Key
    nears: tuple[int | None, int | None] = (None, None)
    """Numbers of the floats that are shown."""
    given_at: Place | None = None
    """Line of the caller, of an argument: what the function was given was made there."""
    yielded_at: Place | None = None
    """Line of the generator that yielded it."""
    is_length: bool = False
    """The values are the lengths of lists: what is in them may be a rank's own all the time."""


@dataclass(frozen=True)
class Compared:
    """The values that both ranks set in the same step."""

    found: Mapping[Key, Unlike | None]
    """None where they are equal."""
    new: frozenset[Key]
    """Those that differ after they had been equal, and did not go on to be equal and different by turns.

    Each line counts by itself; one that makes a variable differ whenever it runs is beside the other lines that set it.
    """
    once: frozenset[Key]
    """Those that differ where they were set a single time, or alike in each of several layers."""
    lengths: Mapping[Key, Unlike | None] = field(default_factory=dict)
    """Of lists, likewise."""

    def beside(self, other: Unlike) -> Unlike | None:
        """What these two ranks have where a value differs between two others; None where that is not known."""
        known = self.lengths if other.is_length else self.found
        if other.key not in known:
            return None
        return known[other.key] or other._replace(theirs=other.mine, nears=other.nears[:1] * 2)

    def without(self, keys: frozenset[Key]) -> Compared:
        """The same where these differ without harm."""
        found = {key: None if key in keys else unlike for key, unlike in self.found.items()}
        return Compared(found, self.new - keys, self.once - keys, self.lengths)

    def of_content(self) -> Compared:
        """The same where the values themselves are what was found to differ: habit is no excuse then."""
        return replace(self, once=frozenset(key for key, unlike in self.found.items() if unlike is not None))

    def is_reason(self, key: Key) -> bool | None:
        """False for a value that is equal, or differs by habit; None for one that is not known."""
        return key in self.new or key in self.once if key in self.found else None


class Scopes:
    """Names as they are known in the whole program: a variable by its function, an attribute without its object."""

    def __init__(self, codes: Sequence[Code]) -> None:
        self._codes = codes
        self._numbers = {(code.file, code.function): number for number, code in enumerate(codes)}

    def of(self, code: int, name: str) -> str:
        """Name in a function: `.scale` of `self.scale`; of a variable of a function around it, that function's."""
        if "." in name:
            return f".{name.rpartition('.')[2]}"
        found, function = self._codes[code], self._codes[code].function
        around = [function, *(function[: at.start()] for at in re.finditer(r"\.<locals>\.", function)), "<module>"]
        for each in around:
            number = self._numbers.get((found.file, each))
            if number is not None and name in self._codes[number].names:
                return f"{number} {name}"
        return name

    def everywhere(self, word: str) -> Iterator[str]:
        """All that a word may mean."""
        yield from (word, f".{word}")
        yield from (f"{number} {word}" for number, code in enumerate(self._codes) if word in code.names)


def compared(
    walks: Walks,
    scopes: Scopes,
    base: int,
    rank: int,
    forks: Sequence[Fork],
    begin: tuple[int, int] = (0, 0),
    *,
    readable: Collection[str] = (),
) -> Compared:
    """The values of `rank` beside those of `base`, from `begin` on; `forks` are all places at which the two part.

    The number of a rank counts as equal: each program has it, and what is made of it is the reason. So do texts that
    are equal but for the numbers of the ranks: `rank_0.log` and `rank_1.log`.
    """
    theirs = {(value.set_at, value.name): value for value in walks.values.get(rank, ())}
    found: dict[Key, Unlike | None] = {}
    lengths: dict[Key, Unlike | None] = {}
    history: dict[tuple[Place, str], list[Key]] = {}
    for value, at in _together(sorted(walks.values.get(base, ())), forks, begin):
        other = theirs.get((at, value.name))
        if other is None or other.place != value.place:
            continue
        key = value.set_at, value.name and scopes.of(value.place[0], value.name)
        is_same = value.known == other.known or _are_own(walks, value, other)
        is_same = is_same or _are_ranks(walks, readable, (base, value), (rank, other))
        nears = value.near, other.near
        unlike = Unlike(value.known_at, value.set_at, value.place, value.name, value.known, other.known, key, nears)
        found[key] = None if is_same else unlike
        if value.length is not None and other.length is not None:
            of_lists = unlike._replace(mine=EXACT | value.length, theirs=EXACT | other.length, is_length=True)
            lengths[key] = None if value.length == other.length else of_lists
        history.setdefault((value.place, value.name), []).append(key)
    new, once = _classified(found, history, walks, base)
    are_lists = {name: keys for name, keys in history.items() if all(key in lengths for key in keys)}
    new_lengths, _ = _classified(lengths, are_lists, walks, base)
    longer = {key: unlike for key, unlike in lengths.items() if unlike is not None and key in new | once | new_lengths}
    return Compared({**found, **longer}, frozenset(new | new_lengths), frozenset(once), lengths)


def _classified(
    found: Mapping[Key, Unlike | None], history: Mapping[tuple[Place, str], Sequence[Key]], walks: Walks, base: int
) -> tuple[set[Key], set[Key]]:
    """The values that differ as never before, and those that were set a single time; see `Compared`."""
    new: set[Key] = set()
    once: set[Key] = set()
    by_name = grouped(found, lambda key: key[1])
    for keys in history.values():
        differ = [number for number, key in enumerate(keys) if found[key] is not None]
        if len(differ) == len(keys) and _was_equal(keys[0], by_name[keys[0][1]], found):
            new.update(keys)
        elif len(keys) == 1 or (keys[0][1] and _is_one_thing(walks.steps[base], walks, [found[key] for key in keys])):
            once.update(keys[number] for number in differ)
        elif differ and differ[0] >= min(_EQUAL, len(differ)) and differ[-1] - differ[0] == len(differ) - 1:
            new.update(keys[number] for number in differ)
    return new, once


def _are_own(walks: Walks, value: Value, other: Value) -> bool:
    """True where the values are equal without the ranks' own numbers, and all ranks have theirs in it."""
    return value.own is not None and value.own == other.own and (value.place, value.name, value.own) in walks.own


def _are_ranks(walks: Walks, readable: Collection[str], *values: tuple[int, Value]) -> bool:
    """True where each rank has its own number, coordinate or offset, in a line that speaks of ranks."""
    value = values[0][1]
    code, line = value.place
    file = walks.codes[code].file
    if file not in readable or not speaks_of_rank(file, line):
        return False
    are_numbers = all(value.known == EXACT | rank for rank, value in values)
    is_offset = parts_by_rank(file, line) and all(value.known & EXACT for _, value in values)
    return are_numbers or is_offset or (value.place, value.name) in walks.coordinates


def _is_one_thing(steps: Sequence[Step], walks: Walks, set_here: Sequence[Unlike | None]) -> bool:
    """True where a line set the same two values each time, before the ranks met again: as in each of several layers."""
    unlike = [one for one in set_here if one is not None]
    is_same = len(unlike) == len(set_here) and not differ((one.mine, one.theirs) for one in unlike)
    return is_same and not walks.issued(steps[unlike[0].set_at : unlike[-1].set_at])


def _was_equal(key: Key, of_name: Sequence[Key], found: Mapping[Key, Unlike | None]) -> bool:
    """True where other lines gave the variable equal values before, each time; what functions return is none."""
    if not key[1]:
        return False
    before = [found[other] for other in of_name if other[0] < key[0]]
    return len(before) >= _EQUAL and not any(before)


def _together(values: Sequence[Value], forks: Sequence[Fork], begin: tuple[int, int]) -> Iterator[tuple[Value, int]]:
    """The values of the first rank, in order, that it set while both were together; and the other one's index then."""
    ahead = iter(forks)
    fork, offset = next(ahead, None), begin[1] - begin[0]
    for value in values:
        if value.set_at < begin[0]:
            continue
        while fork is not None and value.set_at >= fork.ends[0]:
            offset = fork.ends[1] - fork.ends[0]
            fork = next(ahead, None)
        if fork is None or value.set_at < fork.starts[0]:
            yield value, value.set_at + offset
