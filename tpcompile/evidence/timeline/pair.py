"""Two ranks side by side -> the fork or the value that their difference comes from.

Ranks part all the time without harm: rank 0 logs. A fork counts when the ranks went the same way there before, or when
they never come together again; and of two forks the earlier one counts when it changed what the later one depends on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.timeline import source
from tpcompile.evidence.timeline.before import UnlikeBefore
from tpcompile.evidence.timeline.depends import Dependence, Frames
from tpcompile.evidence.timeline.flow import EXACT, WATCHED, Code, Kind
from tpcompile.evidence.timeline.values import Compared, Scopes, Unlike
from tpcompile.evidence.timeline.walk import Fork, Place, Step, Walks, is_line, kind_of, line_step, place_of

_NEAR = 6000
"""Steps before a fork that are looked at for what it depends on."""


Origin = Fork | Unlike | UnlikeBefore


class Counts(NamedTuple):
    """What parted two ranks."""

    origin: Origin
    last: Fork | Unlike | None
    """The fork, or the last value, that depends on it; often itself."""
    is_uneven: bool
    """Only one of the ranks issued a collective after it."""
    is_linked: bool = True
    """What differs depends on it; False for the last thing that the ranks did differently, which may be the reason."""

    is_habit: bool = False
    """The ranks went different ways there all the time, as those do that have roles of their own."""
    is_role: bool = False
    """The branch speaks of ranks, and was passed for the first time."""
    setting: tuple[Place, int] | None = None
    """The line after the fork that gave a value on one of the ranks alone, and this rank."""

    @property
    def start(self) -> int:
        """Index of its first step on the first rank."""
        return start_of(self.origin)


def start_of(origin: Origin) -> int:
    if isinstance(origin, UnlikeBefore):
        return -1
    return origin.known_at if isinstance(origin, Unlike) else origin.starts[0]


@dataclass(frozen=True)
class Pair:
    """Two ranks."""

    walks: Walks
    scopes: Scopes
    base: int
    rank: int
    readable: frozenset[str]
    forks: Sequence[Fork]
    """All places at which they part."""
    values: Compared
    before: Sequence[UnlikeBefore] = ()
    """What the two had set differently before their first step."""
    is_same_program: bool = True
    """False for ranks of different domains: what they do differently all the time, they do by their role."""

    def that_counts(self, named: Collection[str], *, is_of_sizes: bool = False) -> Counts | None:
        """What the difference of the ranks comes from; sizes that differ come from no roles, which went well before."""
        passes = _passes(self.walks.steps[self.base])
        by_branch = grouped(self.forks, lambda fork: fork.branch)
        usual = {branch for branch, alike in by_branch.items() if _is_habit(self.apart(alike), passes.get(branch, ()))}
        habits: list[Fork] = []
        once: list[Fork] = []
        uneven: list[Fork] = []
        for fork in self.forks:
            is_habit = fork.branch in usual
            (habits if is_habit else once).append(fork)
            if self._is_uneven(fork) or (fork.is_final and not is_habit):
                uneven.append(fork)
        # The first collective that only one rank issues: all that comes later is shifted.
        last = first(fork for fork in uneven if fork in once) or (first(uneven) if self.is_same_program else None)
        is_role = is_of_sizes and last in habits
        if last is None or is_role:
            found = self._of_content(once, frozenset() if is_role else self._changed_by(habits), named)
            if found is not None or last is None:
                return found
        roles = [fork for fork in once if self._speaks_of_rank(fork) and _is_first(fork, passes.get(fork.branch, ()))]
        if last in roles:
            others = [fork for fork in once if fork not in roles]
            found = self._of_content(others, self._changed_by([*habits, *roles]), named)
            if found is not None and found.is_linked:
                return found
        differing = self._changed_by(fork for fork in habits if fork.starts[0] < last.starts[0])
        earlier = [fork for fork in once if fork.starts[0] < last.starts[0]]
        origin = self._origin(last, earlier, differing, habits)
        return Counts(origin, last, True, is_habit=last in habits, is_role=last in roles and origin is last)

    def _speaks_of_rank(self, fork: Fork) -> bool:
        """True where the line of the branch does: such a branch gives ranks their parts in the program."""
        code, line = fork.branch
        file = self.walks.codes[code].file
        return file in self.readable and source.speaks_of_rank(file, line)

    def apart(self, alike: Sequence[Fork]) -> list[Fork]:
        """Of forks at one branch those between which the first rank issued a collective.

        A loop without one goes over the items of a list: what it does differently with some of them is one thing.
        """
        found: list[Fork] = []
        for fork in alike:
            if not found or bisect_left(self._met, found[-1].starts[0]) < bisect_left(self._met, fork.starts[0]):
                found.append(fork)
        return found

    @cached_property
    def _marks(self) -> list[int]:
        """Indices of the steps at which the first rank called compiled regions, and at which the watch began."""
        return [index for index, step in enumerate(self.walks.steps[self.base]) if kind_of(step) is Kind.MARK]

    @cached_property
    def _watched_from(self) -> int:
        """Index of the step of the first rank at which the watch began; 0 where the setup is not known."""
        steps = self.walks.steps[self.base]
        return first(index for index in self._marks if self._code(steps[index]) == WATCHED) or 0

    @cached_property
    def _met(self) -> list[int]:
        """Indices of the steps at which the first rank issued collectives."""
        return [index for index, step in enumerate(self.walks.steps[self.base]) if self.walks.issued([step])]

    def _of_content(self, once: Sequence[Fork], differing: frozenset[str], named: Collection[str]) -> Counts | None:
        """Where all ranks issued the same collectives: the value that what they were doing last depends on."""
        steps = self.walks.steps[self.base]
        calls = [index for index in self._marks if index != self._watched_from]
        ends = {len(steps), *(1 + index for index in (*calls[-1:], *self._met[-1:]))}
        running = {line for end in ends for line in Frames.of(steps[:end]).lines}
        words = frozenset(name for word in named for name in self.scopes.everywhere(word))
        seeds = words.union(*(self._read(steps[index]) for index in running))
        depends = self._dependence(seeds, len(steps), differing, once)
        found = self._reason(depends, once)
        is_sure = found is None or (isinstance(found, Unlike) and self._is_item(found))
        set_before = None if isinstance(found, Fork) else self._set_before(depends.wanted, is_sure=is_sure)
        if set_before is not None:
            return Counts(set_before, found if isinstance(found, Unlike) else None, False)
        if found is not None:
            lines = [one for one in depends.reasons if is_line(steps[one.set_at])]
            following: list[Fork | Unlike] = [*lines[:1], *list(depends.decided.values())[:1]]  # both newest first
            last = max(following, key=start_of, default=None)
            if isinstance(found, Fork):
                return Counts(found, None, False, setting=self._setting(found, depends.wanted))
            return Counts(found, last, False)
        made_of = self._dependence(words, len(steps), frozenset(), (), of_content=True)
        made_here = self._reason(made_of, ())
        if made_here is not None:
            return Counts(made_here, None, False)
        if differing or not once or once[-1].starts[0] < self._watched_from:  # roles, of which a setup is full
            return None
        newest = once[-1]
        apart = self._set_apart_after(newest)
        if apart is None:
            return Counts(self._origin(newest, once[:-1], differing), newest, False, False)
        depends = self._dependence(self._read(steps[apart.set_at]), apart.set_at, differing, ())
        return Counts(self._reason(depends, ()) or apart, None, False, False)

    def _set_apart_after(self, fork: Fork) -> Unlike | None:
        """The first value that differs from some time on and was equal after that fork, which is no reason then."""
        steps = self.walks.steps[self.base]
        found = self.values.found
        agreed = {
            (name, place_of(steps[at])) for (at, name), unlike in found.items() if unlike is None and at >= fork.ends[0]
        }
        new = [one for one in map(found.__getitem__, self.values.new) if one is not None and is_line(steps[one.set_at])]
        after = [one for one in new if one.set_at >= fork.ends[0] and (one.key[1], one.place) in agreed]
        return min(after, key=start_of, default=None)

    def _set_before(self, wanted: set[str], *, is_sure: bool) -> UnlikeBefore | None:
        """What was set differently before the block; a container only where nothing else is known to be the reason."""
        return first(one for one in self.before if one.names & wanted and (one.is_plain or is_sure))

    def _changed_by(self, habits: Iterable[Fork]) -> frozenset[str]:
        """Names whose values differ between the ranks without harm."""
        return frozenset[str]().union(*map(self._changed, habits))

    def _is_uneven(self, fork: Fork) -> bool:
        mine, theirs = self._ways(fork)
        return self.walks.issued(mine) != self.walks.issued(theirs)

    def _ways(self, fork: Fork) -> tuple[Sequence[Step], Sequence[Step]]:
        mine, theirs = self.walks.steps[self.base], self.walks.steps[self.rank]
        return mine[fork.starts[0] : fork.ends[0]], theirs[fork.starts[1] : fork.ends[1]]

    def _changed(self, fork: Fork) -> set[str]:
        """Names to which only one of the ranks gave a value."""
        mine, theirs = self._ways(fork)
        return {name for step in (*mine, *theirs) if is_line(step) for name in self._assigned(step)}

    def _setting(self, fork: Fork, wanted: Collection[str]) -> tuple[Place, int] | None:
        """The first line of this function by which one rank alone gave a value to one of the names, and the rank."""
        found: list[tuple[Place, int]] = []
        for rank, way in zip((self.base, self.rank), self._ways(fork), strict=True):
            lines = (step for step in way if is_line(step) and place_of(step)[0] == fork.branch[0])
            setting = first(step for step in lines if source.touches(self._assigned(step), wanted))
            if setting is not None:
                found.append((place_of(setting), rank))
        return found[0] if len(found) == 1 and found[0][0] != fork.branch else None

    def reads_own_data(self, fork: Fork) -> bool:
        """True where the branch reads a value that each rank has of its own all the time: it may go either way."""
        found = self.values.found
        for name in self._read(line_step(fork.branch)):
            newest = max((key for key in found if key[1] == name and key[0] < fork.starts[0]), default=None)
            if newest is not None and found[newest] is not None and self.values.is_reason(newest) is False:
                return True
        return False

    def _has_lines(self, fork: Fork) -> bool:
        code, _ = fork.branch
        places = {place_of(step) for way in self._ways(fork) for step in way if is_line(step)}
        return any(place[0] == code and place != fork.branch for place in places)

    def _origin(
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
            return self._origin(inside, before, known_to_differ, habits)
        depends = self._dependence(self._reads_at(last), last.starts[0], known_to_differ, earlier)
        changing = first(self._changing(depends, earlier))
        reasons = [fork for fork in (changing, self._making(last, earlier)) if fork is not None]
        return min(reasons, key=start_of, default=last)

    def _dependence(
        self, names: Collection[str], end: int, known_to_differ: frozenset[str], earlier: Sequence[Fork], *,
        of_content: bool = False,
    ) -> Dependence:  # fmt: skip
        steps = self.walks.steps[self.base][:end]
        values = self.values.of_content() if of_content else self.values
        found = Dependence(
            steps, self._read, self._assigned, values, known_to_differ, earlier, self._changed, self._has_lines
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
            or (one.starts[0] >= begin and source.touches(self._changed(one), depends.wanted))
        ]

    def _making(self, last: Fork, earlier: Sequence[Fork]) -> Fork | None:
        """Where one rank alone came by the function that only this rank enters at `last`: a hook, a callback."""
        starts = [{step for step in way if kind_of(step) is Kind.START} for way in self._ways(last)]
        alone = starts[0] ^ starts[1]
        entered = [step for step in chain(*self._ways(last)) if step in alone]
        if not entered:
            return None
        code = self._code(entered[0])
        maker, _, name = code.function.rpartition(".")
        maker = maker.removesuffix(".<locals>")
        names = frozenset(self.scopes.everywhere(name))
        rank, start, way = next(
            found
            for found in zip((self.base, self.rank), last.starts, self._ways(last), strict=True)
            if entered[0] in found[2]
        )
        caller = first(filter(is_line, self.walks.steps[rank][start + way.index(entered[0]) :: -1]))
        is_called = caller is None or not names.isdisjoint(self._read(caller))  # by a line that names it

        def makes(step: Step) -> bool:
            found = self._code(step)
            if kind_of(step) is Kind.START:
                is_maker = maker in (found.function, found.function.rpartition(".")[0])
                return bool(maker) and found.file == code.file and is_maker
            return is_line(step) and not is_called and not names.isdisjoint(self._read(step))  # registered there

        return first(fork for fork in earlier if any(map(makes, chain(*self._ways(fork)))))

    def _code(self, step: Step) -> Code:
        return self.walks.codes[place_of(step)[0]]

    def _reason(self, depends: Dependence, earlier: Sequence[Fork]) -> Fork | Unlike | None:
        """The earliest fork or value.

        A value that was set only once counts where there is no other reason, or where what depends on it was equal
        until then. So does the item that a loop took where there is no other: it was made elsewhere, and what reads it
        says what is wrong with it.
        """
        fork = first(self._changing(depends, earlier))
        made = [one for one in depends.reasons if self._is_given(one) or is_line(depends.steps[one.set_at])]
        own = [one for one in made if not self._is_item(one)]
        new = [one for one in made if one.key in self.values.new]
        equal_until = self._equal_until(min(new, key=start_of)) if new else len(depends.steps)
        late = [one for one in own if one.key in self.values.new or one.set_at > equal_until]
        reasons = [one for one in (fork, *late) if one is not None]
        return min(reasons or new or own or made, key=start_of, default=None)

    def _equal_until(self, unlike: Unlike) -> int:
        """Index of the last step before that gave it equal values on both ranks; the number of steps without one.

        Of the items of a loop some may be equal: those count that a call of its function before took.
        """
        steps = self.walks.steps[self.base]
        code, end = unlike.place[0], unlike.set_at
        if self._is_item(unlike):
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

    def _is_item(self, unlike: Unlike) -> bool:
        """True for what the head of a loop sets."""
        code, line = unlike.place
        return source.is_loop(self.walks.codes[code].file, line, self.readable)

    def _reads_at(self, fork: Fork) -> frozenset[str]:
        """Names that the branch reads: in its line, and in the functions that this line called."""
        steps = self.walks.steps[self.base][: fork.starts[0]]
        lines = filter(is_line, steps[last_pass(steps, fork.branch) :])
        return frozenset[str]().union(*map(self._read, lines))

    def _read(self, step: Step) -> frozenset[str]:
        return self._names(step, source.read)

    def _assigned(self, step: Step) -> frozenset[str]:
        return self._names(step, source.assigned)

    def _names(self, step: Step, of_line: Callable[[str, int], Iterable[str]]) -> frozenset[str]:
        code, line = place_of(step)
        file = self.walks.codes[code].file
        names = of_line(file, line) if file in self.readable else ()
        return frozenset(self.scopes.of(code, name) for name in names)


def last_pass(steps: Sequence[Step], branch: Place) -> int:
    """Index at which the branch was entered last; 0 where that is no longer known."""
    backwards = range(len(steps) - 1, -1, -1)
    return next((index for index in backwards if is_line(steps[index]) and place_of(steps[index]) == branch), 0)


def _passes(steps: Sequence[Step]) -> dict[Place, list[int]]:
    """Place -> the indices at which the rank was there."""
    places: dict[Place, list[int]] = {}
    for index, step in enumerate(steps):
        if is_line(step):
            places.setdefault(place_of(step), []).append(index)
    return places


def _is_first(fork: Fork, passes: Sequence[int]) -> bool:
    """True where the first rank had not passed the branch before."""
    return bisect_left(passes, fork.starts[0]) <= 1


def _is_habit(alike: Sequence[Fork], passes: Sequence[int]) -> bool:
    """True for a branch at which the ranks part again and again: always, or now and then.

    A rank that goes wrong in each iteration since its first fault went the same way as the others before that one.
    """
    if len(alike) < 2:
        return False
    had_agreed = bisect_left(passes, alike[0].starts[0]) > 1
    agrees_between = any(
        bisect_left(passes, later.starts[0]) - bisect_left(passes, earlier.ends[0]) > 1
        for earlier, later in pairwise(alike)
    )
    return agrees_between or not had_agreed
