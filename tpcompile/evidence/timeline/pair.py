"""Two ranks side by side -> what of their differences counts, and what it comes from.

Ranks part all the time without harm: rank 0 logs. A fork counts when the ranks went the same way there before, or when
they never come together again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.timeline.before import UnlikeBefore
from tpcompile.evidence.timeline.depends import Frames
from tpcompile.evidence.timeline.flow import WATCHED, Kind
from tpcompile.evidence.timeline.reasons import Reasons, start_of
from tpcompile.evidence.timeline.values import Unlike
from tpcompile.evidence.timeline.walk import Fork, Place, is_line, kind_of, line_step, place_of

Origin = Fork | Unlike | UnlikeBefore


class Weight(IntEnum):
    """How much what parted two ranks counts beside what parted others."""

    UNLINKED_ROLE = auto()
    """A part that a rank takes in the program, once; nothing is known to depend on it."""
    UNLINKED = auto()
    """Nothing is known to depend on it."""
    HABIT_OF_SIZES = auto()
    ROLE = auto()
    """Ranks only took the parts that they have in the program: a value that others set differently says more."""
    CONTENT = auto()
    """All issued the same, with different content."""
    HABIT = auto()
    """Stages of a pipeline part all the time: what one of them does once says more."""
    ONCE = auto()


class Counts(NamedTuple):
    """What parted two ranks."""

    origin: Origin
    last: Fork | Unlike | None
    """The fork, or the last value, that depends on it; often itself."""
    is_uneven: bool
    """Only one of the ranks issued a collective after it."""
    is_linked: bool = True
    """What differs depends on it; False for the last thing that the ranks did differently, which may be the reason."""
    is_recent: bool = False
    """They did so since they met last."""

    is_habit: bool = False
    """The ranks went different ways there all the time, as those do that have roles of their own."""
    is_role: bool = False
    """The branch speaks of ranks, and was passed for the first time."""

    def weight(self, *, is_of_sizes: bool) -> Weight:
        """How much it counts beside what other pairs of ranks have; sizes that differ come from no habits."""
        if self.is_uneven and not (self.is_habit and is_of_sizes):
            if self.is_role:
                return Weight.ROLE
            return Weight.HABIT if self.is_habit else Weight.ONCE
        if not self.is_linked:
            return Weight.UNLINKED_ROLE if self.is_role else Weight.UNLINKED
        return Weight.HABIT_OF_SIZES if self.is_uneven else Weight.CONTENT

    @property
    def start(self) -> int:
        """Index of its first step on the first rank."""
        return -1 if isinstance(self.origin, UnlikeBefore) else start_of(self.origin)


@dataclass(frozen=True)
class Pair:
    """Two ranks."""

    reasons: Reasons
    """What they did differently, and what that may come from."""
    before: Sequence[UnlikeBefore] = ()
    """What the two had set differently before their first step."""
    harmless: frozenset[tuple[Place, int]] = frozenset()
    """(branch, index of a step of the first rank) at which it also parts from a rank that is known to agree with it."""
    has_witness: bool = False
    """A third rank has the value of the first one, so that what is left tells the two apart and not all."""

    def that_counts(self, named: Collection[str], *, is_of_sizes: bool = False) -> Counts | None:
        """What the difference of the ranks comes from; sizes that differ come from no roles, which went well before."""
        passes = self.reasons.passes
        by_branch = grouped(self.reasons.forks, lambda fork: fork.branch)
        usual = {branch for branch, alike in by_branch.items() if _is_habit(self.apart(alike), passes.get(branch, ()))}
        habits: list[Fork] = []
        once: list[Fork] = []
        uneven: list[Fork] = []
        for fork in self.reasons.forks:
            if (fork.branch, fork.starts[0]) in self.harmless:
                continue
            is_habit = fork.branch in usual
            (habits if is_habit else once).append(fork)
            if self._is_uneven(fork) or (fork.is_final and not is_habit):
                uneven.append(fork)
        # The first collective that only one rank issues: all that comes later is shifted.
        last = first(fork for fork in uneven if fork in once) or (
            first(uneven) if self.reasons.is_same_program else None
        )
        is_role = is_of_sizes and last in habits
        # Branches by which ranks take their parts in the program: a reason only where nothing else is one.
        roles = {fork for fork in once if self.reasons.is_part(fork)}
        others = [fork for fork in once if fork not in roles]
        if last is None or is_role:
            known_to_differ = [] if is_role else habits
            found = None
            if roles:
                found = self._of_content(others, self.reasons.changed_by([*known_to_differ, *roles]), named)
            if found is None or not found.is_linked:
                found = self._of_content(once, self.reasons.changed_by(known_to_differ), named)
            if found is not None or last is None:
                return found
        if last in roles:
            found = self._of_content(others, self.reasons.changed_by([*habits, *roles]), named)
            if found is not None and found.is_linked:
                return found
        differing = self.reasons.changed_by(fork for fork in habits if fork.starts[0] < last.starts[0])
        earlier = [fork for fork in once if fork.starts[0] < last.starts[0]]
        origin: Fork | Unlike = self.reasons.origin(
            last, [fork for fork in earlier if fork not in roles], differing, habits
        )
        if isinstance(origin, Fork) and not self.reasons.decides(origin):
            with_roles = self.reasons.origin(last, earlier, differing, habits)
            chosen: Fork | Unlike | None = first(filter(self.reasons.decides, [last, with_roles]))
            chosen = chosen or self.reasons.made_before(last, differing, earlier)
            origin = chosen or first(filter(self.reasons.decides, reversed(earlier))) or last
        return Counts(origin, last, True, is_habit=last in habits, is_role=last in roles and origin is last)

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
        return [
            index
            for index, step in enumerate(self.reasons.walks.steps[self.reasons.base])
            if kind_of(step) is Kind.MARK
        ]

    @cached_property
    def _watched_from(self) -> int:
        """Index of the step of the first rank at which the watch began; 0 where the setup is not known."""
        steps = self.reasons.walks.steps[self.reasons.base]
        return first(index for index in self._marks if self.reasons.code(steps[index]) == WATCHED) or 0

    @cached_property
    def _met(self) -> list[int]:
        """Indices of the steps at which the first rank issued collectives."""
        return [
            index
            for index, step in enumerate(self.reasons.walks.steps[self.reasons.base])
            if self.reasons.walks.issued([step])
        ]

    def _of_content(self, once: Sequence[Fork], differing: frozenset[str], named: Collection[str]) -> Counts | None:
        """Where all ranks issued the same collectives: the value that what they were doing last depends on."""
        steps = self.reasons.walks.steps[self.reasons.base]
        calls = [index for index in self._marks if index != self._watched_from]
        ends = {len(steps), *(1 + index for index in (*calls[-1:], *self._met[-1:]))}
        running = {line for end in ends for line in Frames.of(steps[:end]).lines}
        words = frozenset(name for word in named for name in self.reasons.scopes.everywhere(word))
        seeds = words.union(*(self.reasons.read(steps[index]) for index in running))
        depends = self.reasons.dependence(seeds, len(steps), differing, once)
        found = self.reasons.earliest(depends, once)
        is_sure = found is None or (isinstance(found, Unlike) and self.reasons.is_item(found))
        set_before = None if isinstance(found, Fork) else self._set_before(depends.wanted, is_sure=is_sure)
        if set_before is not None:
            return Counts(set_before, found if isinstance(found, Unlike) else None, False)
        if found is not None:
            lines = [one for one in depends.reasons if is_line(steps[one.set_at])]
            following: list[Fork | Unlike] = [*lines[:1], *list(depends.decided.values())[:1]]  # both newest first
            return Counts(found, None if isinstance(found, Fork) else max(following, key=start_of, default=None), False)
        made_of = self.reasons.dependence(words, len(steps), frozenset(), (), of_content=True)
        made_here = self.reasons.earliest(made_of, ())
        if made_here is not None:
            return Counts(made_here, None, False)
        met_before = self._met[-2] if len(self._met) > 1 else 0
        if not once and self.has_witness and (alone := self.reasons.set_apart(met_before)) is not None:
            return Counts(alone, None, False, False)
        if differing or not once or once[-1].starts[0] < self._watched_from:  # roles, of which a setup is full
            return None
        newest = once[-1]
        apart = self._set_apart_after(newest)
        if apart is None:
            is_recent = len(self._met) > 1 and newest.starts[0] > self._met[-2]  # in the newest they are stuck
            origin = self.reasons.origin(newest, once[:-1], differing)
            return Counts(origin, newest, False, False, is_recent, is_role=self.reasons.is_part(newest))
        depends = self.reasons.dependence(self.reasons.read(steps[apart.set_at]), apart.set_at, differing, ())
        return Counts(self.reasons.earliest(depends, ()) or apart, None, False, False)

    def _set_apart_after(self, fork: Fork) -> Unlike | None:
        """The first value that differs from some time on and was equal after that fork, which is no reason then."""
        steps = self.reasons.walks.steps[self.reasons.base]
        found = self.reasons.values.found
        agreed = {
            (name, place_of(steps[at])) for (at, name), unlike in found.items() if unlike is None and at >= fork.ends[0]
        }
        new = [
            one
            for one in map(found.__getitem__, self.reasons.values.new)
            if one is not None and is_line(steps[one.set_at])
        ]
        after = [one for one in new if one.set_at >= fork.ends[0] and (one.key[1], one.place) in agreed]
        return min(after, key=start_of, default=None)

    def _set_before(self, wanted: set[str], *, is_sure: bool) -> UnlikeBefore | None:
        """What was set differently before the block; a container only where nothing else is known to be the reason."""
        return first(one for one in self.before if one.names & wanted and (one.is_plain or is_sure))

    def _is_uneven(self, fork: Fork) -> bool:
        mine, theirs = self.reasons.ways(fork)
        return self.reasons.walks.issued(mine) != self.reasons.walks.issued(theirs)

    def reads_own_data(self, fork: Fork) -> bool:
        """True where the branch reads a value that each rank has of its own all the time: it may go either way."""
        found = self.reasons.values.found
        for name in self.reasons.read(line_step(fork.branch)):
            newest = max((key for key in found if key[1] == name and key[0] < fork.starts[0]), default=None)
            if newest is not None and found[newest] is not None and self.reasons.values.is_reason(newest) is False:
                return True
        return False


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
