"""A row of items -> the difference, in one line and never cut where they differ."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from tpcompile.evidence.byrank import Groups
from tpcompile.evidence.layerspec import Row
from tpcompile.evidence.records import Item, ItemKind
from tpcompile.evidence.several import differ, first
from tpcompile.evidence.text.ranks import ranks_text

_BRIEF = 80
_SCOPE = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_ENVIRON = re.compile(r"\bos\.environ\._data\[b'(\w+)'\]")
_EXPLANATION = "Explanation: "
"""Before what torch explains about a graph break, behind what it was doing."""
_WORD_END = re.compile(r"[ ,}]")
_WORDS = {"dynamic": "dynamic marks"}


def headline(row: Row, groups: Groups) -> str:
    """`autocast cpu: off / on`, or what one side has and the others have not."""
    if not row.present:
        return "the ranks differ"
    if row.is_full:
        return _between(row.present)
    have = [rank for index in row.owners for rank in groups[index]]
    return f"{_alone(row.first)}, on rank {ranks_text(have)} only"


def spoken(source: str) -> str:
    """A source as the user would write it: `L['self']._modules['head']._parameters['weight']` is `self.head.weight`."""
    own = _MEMBER.sub(r".\1", _SCOPE.sub(r"\1", source))
    return _ENVIRON.sub(r"os.environ['\1']", own)


def _alone(item: Item) -> str:
    """An item that has no counterpart."""
    return _ALONE.get(item.kind, _said)(item)


def _said(item: Item) -> str:
    return _cut(f"{item.about}: {item.says}")


def _between(items: Sequence[Item]) -> str:
    """Items that say different things about the same."""
    return _BETWEEN.get(items[0].kind, _values)(items)


def _values(items: Sequence[Item]) -> str:
    return f"{items[0].about}: {_versus([item.says for item in items])}"


def _nodes(items: Sequence[Item]) -> str:
    calls = list(map(_call, items))
    if differ(calls):
        return _versus(calls)
    return f"{_cut(calls[0])}: {_versus_in(items, 'value')}"


def _call(item: Item) -> str:
    """`mul(%1, 3)`; an input is named as such."""
    target, args = item.fields["target"], item.fields["args"]
    if item.fields["op"] == "placeholder":
        return f"input {target}"
    return f"{target}({args})" if item.fields["op"] == "call" else f"{item.fields['op']} {target}({args})"


def _guards(items: Sequence[Item]) -> str:
    values = [item.notes.get("value", "") for item in items]
    if all(values):
        subject = items[0].notes.get("subject", items[0].about)
        return f"{spoken(subject)} == {_versus(values)}"
    about = f"guard on {spoken(items[0].about)}"
    properties = items[0].notes if "keys" in items[0].notes else {}
    differing = first(filter(Row(items).differs_in_note, properties))
    if differing:
        return f"{about}: {differing} {_versus(Row(items).notes(differing))}"
    return f"{about}: {_versus([spoken(item.fields['expression']) for item in items])}"


def _fields(items: Sequence[Item]) -> str:
    """The fields in which they differ, the first two."""
    first = items[0]
    differing = [name for name in first.fields if Row(items).differs_in(name)]
    if "op" in differing:
        return f"{first.about}: {_versus_in(items, 'op')}"
    about = spoken(first.about) if first.kind == ItemKind.INPUT else f"{first.about} {first.fields['op']}"
    shown = [f"{_WORDS.get(name, name)} {_versus_in(items, name)}" for name in differing[:2]]
    return f"{about}: {', '.join(shown)}"


def _versus_in(items: Sequence[Item], field: str) -> str:
    return _versus([item.fields[field] for item in items])


def _versus(texts: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(differing_part(texts)))


def differing_part(texts: Sequence[str]) -> list[str]:
    """What tells texts apart: of texts that fit on a line the whole, of longer ones the part around the difference."""
    is_short = max(map(len, texts)) <= _BRIEF
    if is_short or not differ(texts):
        return [_cut(text) for text in texts]
    before = _common_start(texts)
    behind = _common_start([text[before:][::-1] for text in texts])
    # Whole words: `dtype=float32`, not `32`.
    start = _word_start(texts[0], before)
    parts = [text[start : _word_end(text, len(text) - behind)] for text in texts]
    at = _common_start(parts)
    return [_cut(part[max(0, at - _BRIEF // 2) :]) for part in parts]


def _common_start(texts: Sequence[str]) -> int:
    """Number of characters with which all of the texts begin."""
    same = itertools.takewhile(lambda column: not differ(column), zip(*texts, strict=False))
    return len(list(same))


def _word_start(text: str, at: int) -> int:
    return max(text.rfind(mark, 0, at) + 1 for mark in " ,{")


def _word_end(text: str, at: int) -> int:
    end = _WORD_END.search(text, at)
    return end.start() if end else len(text)


def _cut(text: str) -> str:
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 3]}..."


_ALONE: Mapping[ItemKind, Callable[[Item], str]] = {
    ItemKind.BREAK: lambda item: f"graph break: {_cut(item.says.rpartition(_EXPLANATION)[2])}",
    ItemKind.FAILURE: lambda item: f"compile failed: {_cut(item.says)}",
    ItemKind.NODE: lambda item: _cut(_call(item)),
    ItemKind.INPUT: lambda item: f"{spoken(item.about)} is read",
    ItemKind.GUARD: lambda item: _cut(spoken(item.fields["expression"])),
    ItemKind.COLLECTIVE: lambda item: _cut(f"{item.about} {item.says}"),
}
"""How an item is told that has no counterpart."""
_BETWEEN: Mapping[ItemKind, Callable[[Sequence[Item]], str]] = {
    ItemKind.NODE: _nodes,
    ItemKind.GUARD: _guards,
    ItemKind.INPUT: _fields,
    ItemKind.COLLECTIVE: _fields,
}
"""How items are told that say different things about the same."""
