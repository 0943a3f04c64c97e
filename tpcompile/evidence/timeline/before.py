"""What ranks had set before the first recorded step -> what differs, and is no part of a rank's role: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpcompile.evidence.iterables import differ
from tpcompile.evidence.timeline.flow import Code, Flow, Set


class UnlikeBefore(NamedTuple):
    """A variable that had different values on the ranks."""

    here: Set
    """The variable as the first rank set it."""
    by_rank: Mapping[int, str]
    names: frozenset[str]
    """Its names, as `Scopes` knows them."""

    @property
    def is_plain(self) -> bool:
        """False for a container, which may have been filled in a different line than the one that sets the variable."""
        return " of " not in self.here.value


def unlike_before(flows: Mapping[int, Flow], codes: Sequence[Code]) -> list[UnlikeBefore]:
    """The variables that all ranks had set, and not alike, in the order in which they were set."""
    numbers = {(code.file, code.function): number for number, code in enumerate(codes)}
    tables = {rank: {(one.file, one.function, one.name): one for one in flow.before} for rank, flow in flows.items()}
    first_table, *_ = tables.values()
    found = []
    for key, here in first_table.items():
        values = {rank: table[key].value for rank, table in tables.items() if key in table}
        without_own = [table[key].own for table in tables.values() if key in table]
        is_own = all(without_own) and not differ(without_own)
        if len(values) == len(tables) and differ(values.values()) and not is_own and not _is_of_role(values):
            found.append(UnlikeBefore(here, values, _names(here, numbers)))
    return found


def _is_of_role(values: Mapping[int, str]) -> bool:
    """True for a number that grows with the rank, and for values of which each rank has its own."""
    is_each_its_own = len(values) > 2 and len(set(values.values())) == len(values)
    distances = {int(value) - rank if value.lstrip("-").isdigit() else None for rank, value in values.items()}
    return is_each_its_own or (len(distances) == 1 and None not in distances)


def _names(here: Set, numbers: Mapping[tuple[str, str], int]) -> frozenset[str]:
    name = here.name.rpartition(".")[2]
    if name != here.name:
        return frozenset({f".{name}"})
    number = numbers.get((here.file, here.function))
    known = {name if number is None else f"{number} {name}"}
    return frozenset(known | ({name, f".{name}"} if here.function == "<module>" else set[str]()))
