"""Items of a layer, one list per group of ranks -> the rows that differ, and one row -> its title."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest

from tpcompile.evidence.digest import SEPARATOR
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import Item, Layer

Fetch = Callable[[int, int, Layer, str], Sequence[Item]]
"""(rank, compile index, layer, part) -> items; index -1 is the rank itself, for the environment."""

Row = Sequence[Item | None]
"""What each group of ranks has at one place; None where a group has nothing."""

_BRIEF = 80
_REFERENCE = re.compile(r"%\d+")


def differing_items(items: Sequence[Sequence[Item]], *, ordered: bool) -> list[tuple[Item | None, ...]]:
    """Rows of items, one per group, wherever the groups do not all say the same; None where a group has nothing."""
    if ordered:
        rows = [r for r in zip_longest(*items) if len({item.text if item else None for item in r}) > 1]
        return _inserted(items) or rows
    texts = [{item.text for item in group} for group in items]
    common = set.intersection(*texts)
    about: dict[str, list[list[Item]]] = {}
    for position, group in enumerate(items):
        for item in group:
            if item.text not in common:
                about.setdefault(item.text.partition(SEPARATOR)[0], [[] for _ in items])[position].append(item)
    found = [row for columns in about.values() for row in zip_longest(*columns)]
    # A value that differs says more than a thing only one side has.
    return sorted(found, key=lambda row: sum(item is None for item in row))


def _inserted(items: Sequence[Sequence[Item]]) -> list[tuple[Item | None, ...]]:
    """When some groups have one item more at the first difference, show that item, not all that moved behind it."""
    keys = [[_without_position(item.text) for item in group] for group in items]
    start = next((i for i, column in enumerate(zip(*keys, strict=False)) if len(set(column)) > 1), None)
    if start is None or len({len(group) for group in items}) == 1:
        return []
    short = min(range(len(items)), key=lambda g: len(items[g]))
    row: list[Item | None] = [None] * len(items)
    for g, group in enumerate(items):
        extra = len(group) - len(items[short])
        moved = keys[g][start + extra : start + extra + 1] == keys[short][start : start + 1]
        if extra and moved:
            row[g] = group[start]
        elif extra or keys[g][start] != keys[short][start]:
            return []
    return [tuple(row)]


def moved_rows(items: Sequence[Sequence[Item]]) -> list[Row]:
    """Rows that differ in more than the numbers that an insertion before them shifts."""
    return [
        row for row in zip_longest(*items) if len({_without_position(item.text) if item else None for item in row}) > 1
    ]


def _without_position(text: str) -> str:
    """An item without the numbers that an insertion before it shifts."""
    return _REFERENCE.sub("%", text)


def title(layer: Layer, groups: list[tuple[int, ...]], found: Sequence[Item | None]) -> str:
    have = [(ranks, item) for ranks, item in zip(groups, found, strict=True) if item is not None]
    says = [_cut(_said(item)) for _, item in have]
    if len(have) < len(groups):
        who = ", ".join(ranks_text(ranks) for ranks, _ in have)
        return f"{layer}: {_subject(layer, have[0][1])}{says[0]} on rank {who} only" if says else f"{layer} differs"
    about = have[0][1].text.partition(SEPARATOR)[0].removeprefix("call ")
    return f"{layer} differs at {about}: {' / '.join(dict.fromkeys(differing_part([_said(i) for _, i in have])))}"


def differing_part(texts: Sequence[str]) -> list[str]:
    """What tells texts apart: of texts that fit on a line the whole, of longer ones the part around the difference."""
    if max(map(len, texts)) <= _BRIEF or len(set(texts)) == 1:
        return [_cut(text) for text in texts]
    start = common_start(texts)
    rests = [text[start:] for text in texts]
    end = common_start([rest[::-1] for rest in rests])
    # Whole words: `dtype=float32`, not `32`.
    start = _word_start(texts[0], start)
    ends = [len(text) - end for text in texts]
    ends = [_word_end(text, at) for text, at in zip(texts, ends, strict=True)]
    return [_cut(text[start:at]) for text, at in zip(texts, ends, strict=True)]


def common_start(texts: Sequence[str]) -> int:
    """Number of characters with which all of the texts begin."""
    columns = enumerate(zip(*texts, strict=False))
    return next((at for at, column in columns if len(set(column)) > 1), min(map(len, texts)))


def _word_start(text: str, at: int) -> int:
    return max((text.rfind(mark, 0, at) + 1 for mark in " ,{"), default=0)


def _word_end(text: str, at: int) -> int:
    found = [place for mark in " ,}" if (place := text.find(mark, at)) >= 0]
    return min(found, default=len(text))


def _cut(text: str) -> str:
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 3]}..."


def _subject(layer: Layer, item: Item) -> str:
    """What an item is about, where that is a name and not a position."""
    about = item.text.partition(SEPARATOR)[0]
    named = layer in (Layer.ENVIRONMENT, Layer.INPUTS, Layer.KERNELS) or about.startswith(
        ("graph break", "compile failed")
    )
    return f"{about}: " if named else ""


def _said(item: Item) -> str:
    """What an item says, without its value."""
    about, _, says = item.text.partition(SEPARATOR)
    return (says or about).removeprefix("call ").partition(" -> ")[0]
