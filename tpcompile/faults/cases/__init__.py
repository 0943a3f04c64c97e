"""All cases, by what differs between the ranks; `find` and `ALL`."""

from __future__ import annotations

from collections.abc import Iterable

from tpcompile.errors import ConfigError
from tpcompile.faults.case import Case
from tpcompile.faults.cases import cache, collectives, compiling, data, eager, healthy, inputs, process, values

_GROUPS = (
    inputs.CASES, values.CASES, collectives.CASES, compiling.CASES, process.CASES, eager.CASES, cache.CASES, data.CASES,
    healthy.CASES,
)  # fmt: skip


def by_name(groups: Iterable[Iterable[Case]]) -> dict[str, Case]:
    """Name -> case, in the order of the groups; two cases may not have one name."""
    found: dict[str, Case] = {}
    for group in groups:
        for case in group:
            assert case.name not in found, f"two cases of the corpus are named {case.name!r}"
            found[case.name] = case
    return found


ALL = by_name(_GROUPS)
"""Name -> case, in the order of the matrix."""


def find(name: str) -> Case:
    """The case of that name. Raises ConfigError for an unknown one."""
    if name not in ALL:
        raise ConfigError(f"unknown case {name!r}; see `tpcompile faults list`")
    return ALL[name]


def chosen(names: Iterable[str]) -> list[Case]:
    """The named cases, all for none. Raises ConfigError for an unknown name."""
    return [find(name) for name in names] or list(ALL.values())
