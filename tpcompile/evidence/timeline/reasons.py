"""What two ranks did differently -> the fork or the value that it comes from.

Of two forks the earlier one is the reason when it changed what the later one depends on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cached_property
from itertools import chain

from tpcompile.evidence.iterables import first
from tpcompile.evidence.timeline import source
from tpcompile.evidence.timeline.depends import Dependence, Frames
from tpcompile.evidence.timeline.flow import EXACT, Code, Kind
from tpcompile.evidence.timeline.values import Compared, Scopes, Unlike
from tpcompile.evidence.timeline.walk import Fork, Place, Step, Walks, is_line, kind_of, line_step, place_of

_NEAR = 6000
"""Steps before a fork that are looked at for what it depends on."""


class _Strength(IntEnum):
    """How much a value that differs says of why the ranks parted; a fork mostly says as much as the strongest."""

    OLD_ITEM = auto()
    """The item that a loop took: it was made elsewhere, and what reads it says what is wrong with it."""
    MADE_BEFORE = auto()
    """Set only once, ahead of steps in which what depends on it was equal."""
    NEW_ITEM = auto()
    MADE_SINCE = auto()
    """Set since all was equal, or for the first time unequally."""


def start_of(origin: Fork | Unlike) -> int:
    """Index of its first step on the first rank."""
    return origin.known_at if isinstance(origin, Unlike) else origin.starts[0]


def last_pass(steps: Sequence[Step], branch: Place) -> int:
    """Index at which the branch was entered last; 0 where that is no longer known."""
    backwards = range(len(steps) - 1, -1, -1)
    return next((index for index in backwards if is_line(steps[index]) and place_of(steps[index]) == branch), 0)


@dataclass(frozen=True)
class Reasons:
    """What the difference of two ranks may come from."""

    walks: Walks
    scopes: Scopes
    base: int
    rank: int
    readable: frozenset[str]
    forks: Sequence[Fork]
    """All places at which they part."""
    values: Compared
    is_same_program: bool
    """False for ranks of different domains: what they do differently all the time, they do by their role."""

    def origin(
        self, last: Fork, earlier: Sequence[Fork], known_to_differ: frozenset[str], habits: Collection[Fork] = ()
    ) -> Fork:
        """The earliest fork that changed what `last` depends on: what its line called, or assigns and reads.

        What differs again and again, the data of a rank, is no evidence.
        """
        mine = self.walks.steps[self.base]
        decided_at = last_pass(mine[: last.starts[0]], last.branch)
        # What this line called returned or raised; where the ranks part here by habit, they did so there as well.
        near = earlier if last not in habits else [fork for fork in self.forks if fork.starts[0] < last.starts[0]]
        inside = first(fork for fork in near if fork.starts[0] > decided_at)
        if inside is not None:
            before = [fork for fork in earlier if fork.starts[0] <= decided_at]
            return self.origin(inside, before, known_to_differ, habits)
        depends = self.dependence(self._reads_at(last), last.starts[0], known_to_differ, earlier)
        changing = first(self._changing(depends, earlier))
        reasons = [fork for fork in (changing, self._making(last, earlier)) if fork is not None]
        return min(reasons, key=start_of, default=last)

    def set_apart(self, since: int) -> Unlike | None:
        """Of the values that differ as never before, or were set a single time, the last one if it is from that step
        on, else the first one."""
        keys = self.values.new | self.values.once
        unlike = sorted(filter(None, map(self.values.found.get, keys)), key=start_of)
        return unlike[-1 if start_of(unlike[-1]) >= since else 0] if unlike else None

    def made_before(self, last: Fork, known_to_differ: frozenset[str], earlier: Sequence[Fork]) -> Fork | Unlike | None:
        """What the line at which the ranks parted depends on, as an object whose method it calls."""
        depends = self.dependence(self._reads_at(last), last.starts[0], known_to_differ, earlier)
        return self.earliest(depends, earlier)

    def earliest(self, depends: Dependence, earlier: Sequence[Fork]) -> Fork | Unlike | None:
        """The earliest fork or value among those that say most."""
        fork = first(self._changing(depends, earlier))
        made = [one for one in depends.reasons if self._is_given(one) or is_line(depends.steps[one.set_at])]
        found = [one for one in made if not self._carries_on(one, made)]
        if not found:
            return fork
        new = [one for one in found if one.key in self.values.new]
        equal_until = self._equal_until(min(new, key=start_of)) if new else len(depends.steps)
        strength = {one.key: self._strength(one, equal_until) for one in found}
        most = max(strength.values())
        if fork is None:  # no branch reads a new item, so that what was made of it says no more
            enough = min(most, _Strength.NEW_ITEM)
            return min((one for one in found if strength[one.key] >= enough), key=start_of)
        strongest: list[Fork | Unlike] = [one for one in found if strength[one.key] == most]
        # A branch that was passed once says no more than a value that was set once.
        is_as_strong = most is _Strength.MADE_BEFORE and self.is_first(fork)
        if most is _Strength.MADE_SINCE or is_as_strong:
            return min([fork, *strongest], key=start_of)
        return fork

    def _carries_on(self, unlike: Unlike, others: Sequence[Unlike]) -> bool:
        """True for a line that changes what differed before, as `count += 1` does."""
        name = unlike.key[1]
        differed_before = any(other.key[1] == name and other.set_at < unlike.set_at for other in others)
        return differed_before and name in self.read(line_step(unlike.place))

    def _strength(self, unlike: Unlike, equal_until: int) -> _Strength:
        """How much a value says of why the ranks parted, where what depends on it was equal up to that step."""
        is_new = unlike.key in self.values.new
        if self.is_item(unlike):
            return _Strength.NEW_ITEM if is_new else _Strength.OLD_ITEM
        return _Strength.MADE_SINCE if is_new or unlike.set_at > equal_until else _Strength.MADE_BEFORE

    def dependence(
        self, names: Collection[str], end: int, known_to_differ: frozenset[str], earlier: Sequence[Fork], *,
        of_content: bool = False,
    ) -> Dependence:  # fmt: skip
        steps = self.walks.steps[self.base][:end]
        values = self.values.of_content() if of_content else self.values
        found = Dependence(
            steps, self.read, self.assigned, values, known_to_differ, earlier, self.changed, self._has_lines
        )
        found.follow(names, max(0, end - _NEAR), Frames.of(steps).callers)
        return found

    def _changing(self, depends: Dependence, earlier: Sequence[Fork]) -> list[Fork]:
        """Forks that changed what is looked for, in order."""
        begin = max(0, len(depends.steps) - _NEAR)
        return [
            one
            for one in earlier
            if one.starts[0] in depends.decided
            or (one.starts[0] >= begin and source.touches(self.changed(one), depends.wanted))
        ]

    def _making(self, last: Fork, earlier: Sequence[Fork]) -> Fork | None:
        """Where one rank alone came by the function that only this rank enters at `last`: a hook, a callback."""
        starts = [{step for step in way if kind_of(step) is Kind.START} for way in self.ways(last)]
        alone = starts[0] ^ starts[1]
        entered = [step for step in chain(*self.ways(last)) if step in alone]
        if not entered:
            return None
        code = self.code(entered[0])
        maker, _, name = code.function.rpartition(".")
        maker = maker.removesuffix(".<locals>")
        names = frozenset(self.scopes.everywhere(name))
        rank, start, way = next(
            found
            for found in zip((self.base, self.rank), last.starts, self.ways(last), strict=True)
            if entered[0] in found[2]
        )
        caller = first(filter(is_line, self.walks.steps[rank][start + way.index(entered[0]) :: -1]))
        is_called = caller is None or not names.isdisjoint(self.read(caller))  # by a line that names it

        def makes(step: Step) -> bool:
            found = self.code(step)
            if kind_of(step) is Kind.START:
                is_maker = maker in (found.function, found.function.rpartition(".")[0])
                return bool(maker) and found.file == code.file and is_maker
            return is_line(step) and not is_called and not names.isdisjoint(self.read(step))  # registered there

        return first(fork for fork in earlier if any(map(makes, chain(*self.ways(fork)))))

    def _equal_until(self, unlike: Unlike) -> int:
        """Index of the last step before that gave it equal values on both ranks; the number of steps without one.

        Of the items of a loop some may be equal: those count that a call of its function before took.
        """
        steps = self.walks.steps[self.base]
        code, end = unlike.place[0], unlike.set_at
        if self.is_item(unlike):
            calls = (
                at for at in range(end, -1, -1) if kind_of(steps[at]) is Kind.START and place_of(steps[at])[0] == code
            )
            end = next(calls, 0)
        equal = [
            at
            for (at, name), found in self.values.found.items()
            if found is None and at < end and name == unlike.key[1] and place_of(steps[at]) == unlike.place
        ]
        return max(equal, default=len(steps))

    def _is_given(self, unlike: Unlike) -> bool:
        """True for an argument that the line of the caller gives to the function it names.

        Not for what a hook is given, nor for the number of each rank in a line that speaks of ranks. What a function of
        another program is given is its role.
        """
        if unlike.given_at is None or not self.is_same_program:
            return False
        code, line = unlike.given_at
        file, function = self.walks.codes[code].file, self.walks.codes[unlike.place[0]].function
        if file not in self.readable:
            return False
        name = function.removesuffix(".__init__").rpartition(".")[2]
        is_named = not source.read(file, line).isdisjoint({name, f".{name}"}) or function.endswith(".__call__")
        are_numbers = (unlike.mine, unlike.theirs) == (EXACT | self.base, EXACT | self.rank)
        return is_named and not (are_numbers and source.speaks_of_rank(file, line))

    def is_item(self, unlike: Unlike) -> bool:
        """True for what the head of a loop sets."""
        code, line = unlike.place
        return source.is_loop(self.walks.codes[code].file, line, self.readable)

    @cached_property
    def passes(self) -> Mapping[Place, Sequence[int]]:
        """Place -> the indices at which the first rank was there."""
        places: dict[Place, list[int]] = {}
        for index, step in enumerate(self.walks.steps[self.base]):
            if is_line(step):
                places.setdefault(place_of(step), []).append(index)
        return places

    def is_first(self, fork: Fork) -> bool:
        """True where the first rank had not passed the branch before."""
        return bisect_left(self.passes.get(fork.branch, ()), fork.starts[0]) <= 1

    def speaks_of_rank(self, fork: Fork) -> bool:
        """True where the line of the branch does: such a branch gives ranks their parts in the program."""
        code, line = fork.branch
        file = self.walks.codes[code].file
        return file in self.readable and source.speaks_of_rank(file, line)

    def decides(self, fork: Fork) -> bool:
        """True where the line of the branch has a choice in it, raised on one of the ranks, or may not be read.

        Where ranks part in `loss.backward()`, the hooks that it calls were chosen elsewhere.
        """
        code, line = fork.branch
        file = self.walks.codes[code].file
        return file not in self.readable or source.decides(file, line) or self._raised(fork)

    def is_part(self, fork: Fork) -> bool:
        """True for a branch that speaks of ranks and was passed for the first time: it gives ranks their parts."""
        return self.speaks_of_rank(fork) and self.is_first(fork) and not self._raised(fork)

    def _raised(self, fork: Fork) -> bool:
        """True where one of the ranks handled an exception next."""
        nexts = [place_of(way[0]) for way in self.ways(fork) if way and is_line(way[0])]
        return any(source.is_handler(self.walks.codes[code].file, line, self.readable) for code, line in nexts)

    def changed_by(self, habits: Iterable[Fork]) -> frozenset[str]:
        """Names whose values differ between the ranks without harm."""
        return frozenset[str]().union(*map(self.changed, habits))

    def changed(self, fork: Fork) -> set[str]:
        """Names to which only one of the ranks gave a value."""
        mine, theirs = self.ways(fork)
        return {name for step in (*mine, *theirs) if is_line(step) for name in self.assigned(step)}

    def ways(self, fork: Fork) -> tuple[Sequence[Step], Sequence[Step]]:
        mine, theirs = self.walks.steps[self.base], self.walks.steps[self.rank]
        return mine[fork.starts[0] : fork.ends[0]], theirs[fork.starts[1] : fork.ends[1]]

    def _has_lines(self, fork: Fork) -> bool:
        code, _ = fork.branch
        places = {place_of(step) for way in self.ways(fork) for step in way if is_line(step)}
        return any(place[0] == code and place != fork.branch for place in places)

    def _reads_at(self, fork: Fork) -> frozenset[str]:
        """Names that the branch reads: in its line, and in the functions that this line called."""
        steps = self.walks.steps[self.base][: fork.starts[0]]
        lines = filter(is_line, steps[last_pass(steps, fork.branch) :])
        return frozenset[str]().union(*map(self.read, lines))

    def code(self, step: Step) -> Code:
        return self.walks.codes[place_of(step)[0]]

    def read(self, step: Step) -> frozenset[str]:
        return self._names(step, source.read)

    def assigned(self, step: Step) -> frozenset[str]:
        return self._names(step, source.assigned)

    def _names(self, step: Step, of_line: Callable[[str, int], Iterable[str]]) -> frozenset[str]:
        code, line = place_of(step)
        file = self.walks.codes[code].file
        names = of_line(file, line) if file in self.readable else ()
        return frozenset(self.scopes.of(code, name) for name in names)
