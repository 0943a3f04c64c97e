"""Ranks -> the short text people read: `0-2,5`, `1-1021 step 4`."""

import re
from collections.abc import Iterator, Sequence

_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?: step (\d{1,9}))?)?")
_MAX_RUNS = 12
"""Runs that a text shows: 12 of single ranks are 60 characters in a job of 1,024."""


def exact_ranks(ranks: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` -> `0-2,5`; different for different ranks, and so a name for them."""
    return ",".join(map(_run_text, _runs(sorted(ranks))))


def ranks_of_exact(text: str, *, at_most: int) -> list[int]:
    """The ranks of an exact text. Raises ValueError for any other text, and for more ranks."""
    found: list[int] = []
    for part in text.split(","):
        run = _RUN.fullmatch(part)
        if run is None:
            raise ValueError(f"no ranks: {part[:40]!r}")
        first, last, step = (int(number or 0) for number in run.groups())
        ranks = range(first, max(first, last) + 1, step or 1)
        if len(found) + len(ranks) > at_most:
            raise ValueError(f"more than {at_most} ranks")
        found += ranks
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` -> `0-2,5`; without a rule in them, the first of many ranks and how many more there are."""
    runs = list(_runs(sorted(ranks)))
    shown = runs if len(runs) <= _MAX_RUNS + 1 else runs[:_MAX_RUNS]
    num_more = len(ranks) - sum(map(len, shown))
    return ",".join(map(_run_text, shown)) + (f" and {num_more} more" if num_more else "")


def _runs(ranks: Sequence[int]) -> Iterator[range]:
    """Ranks in order, as few ranges; those with a step only where their text is shorter."""
    start = 0
    while start < len(ranks):
        end = start + 1
        step = ranks[end] - ranks[start] if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        run = range(ranks[start], ranks[end - 1] + 1, step or 1)
        is_short = step == 1 or len(_run_text(run)) < len(",".join(map(str, run)))
        if not is_short:
            run, end = range(ranks[start], ranks[start] + 1), start + 1
        yield run
        start = end


def _run_text(run: range) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}" + (f" step {run.step}" if run.step != 1 else "")


def is_among(rank: int, text: str) -> bool:
    """True for a rank that an exact text of ranks has: 1 is among `0-2,5`."""
    for first, last, step in _RUN.findall(text):
        if rank in range(int(first), int(last or first) + 1, int(step or 1) or 1):
            return True
    return False


def ranks_in_name(name: str) -> str:
    """The text of ranks at the end of the name of a domain, `0-12 step 4` of `tp 0-12 step 4`; empty without one."""
    found = re.search(rf"(?:^| )({_RUN.pattern}(?:,{_RUN.pattern})*)$", name)
    return found[1] if found else ""


def axis_of(domain: str) -> str:
    """`tp` of `tp 0-12 step 4`: what ranks of that domain have in common with those of others."""
    return domain.removesuffix(ranks_in_name(domain)).rstrip()


def places_of(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of all ranks of a domain -> their places in it: the coordinates along its axis."""
    place_of = {rank: place for place, rank in enumerate(sorted(rank for group in groups for rank in group))}
    return tuple(tuple(place_of[rank] for rank in group) for group in groups)


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 7` or `ranks 0-6`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {ranks_text(ranks)}"


def num_ranks(number: int) -> str:
    """`1 rank` or `2 ranks`."""
    return f"{number} rank" if number == 1 else f"{number} ranks"
