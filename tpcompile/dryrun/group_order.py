"""The process groups that each rank made -> one failed check where not all ranks made the same ones in the same order.

`new_group` is called by all ranks of the job, members or not: where the order differs, a rank joins the group of others
under the name of its own, and waits for ranks that never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from tpcompile.dryrun.rank import Group, Left
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Check, CheckId, Status
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks


class GroupOrder:
    """Takes ranks as they end."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Group, ...]] = {}
        self._of_rank: dict[int, str] = {}

    def take(self, rank: int, left: Left) -> None:
        """What this rank made; the groups themselves come with the first rank that made them."""
        self._of_rank[rank] = left.groups
        if left.groups_made:
            self._made[left.groups] = left.groups_made

    def problems(self) -> list[Check]:
        """A check for each order that most ranks do not have. Where there is no majority, the ranks are not known."""
        alike = grouped(sorted(self._of_rank), lambda rank: self._of_rank[rank])
        usual, *others = sorted(alike, key=lambda order: -len(alike[order])) or [""]
        return [
            self._check(alike[other], other, usual, is_known=len(alike[other]) < len(alike[usual])) for other in others
        ]

    def _check(self, ranks: Sequence[int], other: str, usual: str, *, is_known: bool) -> Check:
        mine, theirs = self._made.get(other, ()), self._made.get(usual, ())
        number, made, wanted = _first_difference(mine, theirs)
        odd = made if made is not None else wanted
        made_text, wanted_text = (
            "not made" if one is None else f"{one.name} {one.ranks}".strip() for one in (made, wanted)
        )
        return Check(
            id=CheckId.GROUPS,
            status=Status.FAIL,
            expected=f"group {number} is {wanted_text}, as on the other ranks",
            observed=f"{named_ranks(ranks)}: group {number} is {made_text}",
            line=None if odd is None else odd.line,
            ranks=tuple(ranks),
            is_rank_known=is_known,
            cause=Cause.GROUP,
        )


def _first_difference(mine: Sequence[Group], theirs: Sequence[Group]) -> tuple[int, Group | None, Group | None]:
    for number, (made, wanted) in enumerate(zip_longest(mine, theirs), 1):
        if made is None or wanted is None or (made.name, made.ranks) != (wanted.name, wanted.ranks):
            return number, made, wanted
    return 0, None, None
