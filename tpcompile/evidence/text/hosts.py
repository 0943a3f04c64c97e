"""Names of hosts -> the short text people read: `node[001-016,018],login`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.text.ranks import ranks_text

_NUMBERED = re.compile(r"(.*?)(\d{1,9})(\D*)")
_MAX_NAMED, _MAX_CHARACTERS = 3, 40
"""Hosts that are named one by one beside ranks, and the length of a text for more of them."""
_MANY = 4
"""Hosts from which on those with as many ranks share a text."""


def hosts_text(names: Iterable[str]) -> str:
    """The hosts, those that differ in their last number alone in one word, as Slurm writes them."""
    by_word = grouped(sorted(names), _word)
    return ",".join(_folded(word, alike) for word, alike in by_word.items())


def _word(name: str) -> tuple[str, int, str]:
    """What is around the last number of a name, and its digits; 0 for a name without one."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], len(found[2]), found[3]) if found else (name, 0, "")


def _folded(word: tuple[str, int, str], names: Sequence[str]) -> str:
    before, digits, after = word
    if len(names) == 1 or not digits:
        return ",".join(names)
    numbers = [int(name[len(before) : len(before) + digits]) for name in names]
    runs = re.sub(r"\d+", lambda number: number[0].zfill(digits), _without_steps(numbers))
    return f"{before}[{runs}]{after}"


def _without_steps(numbers: Sequence[int]) -> str:
    """`1-3,5`; Slurm writes no steps."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in runs)


def on_hosts(ranks: Sequence[int], hosts: Mapping[str, Sequence[int]]) -> str:
    """` (node-b)` for ranks of that host, ` (node[001-064])` for those of many.

    Empty where the hosts are not known, and where their names have no rule.
    """
    found = [host for host, theirs in hosts.items() if not set(ranks).isdisjoint(theirs)]
    if len(found) <= _MAX_NAMED:
        return f" ({', '.join(found)})" if found else ""
    text = hosts_text(found)
    return f" ({text})" if len(text) <= _MAX_CHARACTERS else ""


def ranks_by_host(hosts: Mapping[str, Sequence[int]]) -> list[str]:
    """`node[001-064] 0-1023, 16 each` for hosts with as many ranks, one after the other; `login 0` for one."""
    runs: list[list[str]] = []
    for host in sorted(hosts, key=lambda name: min(hosts[name], default=0)):
        if len(hosts) >= _MANY and runs and _follows(hosts[host], hosts[runs[-1][-1]]):
            runs[-1].append(host)
        else:
            runs.append([host])
    found: list[str] = []
    for names in runs:
        ranks = [rank for name in names for rank in hosts[name]]
        each = f", {len(hosts[names[0]])} each" if len(names) > 1 else ""
        found.append(f"{hosts_text(names)} {ranks_text(ranks)}{each}")
    return found


def _follows(ranks: Sequence[int], before: Sequence[int]) -> bool:
    return len(ranks) == len(before) > 0 and list(ranks) == list(range(before[-1] + 1, before[-1] + 1 + len(ranks)))
