"""A row of items -> the difference, in one line and never cut where they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpcompile.evidence.layerspec import Groups, Row
from tpcompile.evidence.records import Item, ItemKind
from tpcompile.evidence.text.ranks import ranks_text

_BRIEF = 80
_SCOPE = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_ENVIRON = re.compile(r"\bos\.environ\._data\[b'(\w+)'\]")
_EXPLANATION = "Explanation: "
"""Before what torch explains about a graph break, behind what it was doing."""
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
    match item.kind:
        case ItemKind.BREAK:
            return f"graph break: {_cut(item.says.rpartition(_EXPLANATION)[2])}"
        case ItemKind.FAILURE:
            return f"compile failed: {_cut(item.says)}"
        case ItemKind.NODE:
            return _cut(_call(item))
        case ItemKind.INPUT:
            return f"{spoken(item.about)} is read"
        case ItemKind.GUARD:
            return _cut(spoken(item.fields["expression"]))
        case ItemKind.COLLECTIVE:
            return _cut(f"{item.about} {item.says}")
    return _cut(f"{item.about}: {item.says}")


def _between(items: Sequence[Item]) -> str:
    """Items that say different things about the same."""
    match items[0].kind:
        case ItemKind.NODE:
            return _nodes(items)
        case ItemKind.GUARD:
            return _guards(items)
        case ItemKind.INPUT | ItemKind.COLLECTIVE:
            return _fields(items)
    says = [item.says for item in items]
    return f"{items[0].about}: {_versus(says)}"


def _nodes(items: Sequence[Item]) -> str:
    calls = [_call(item) for item in items]
    if len(set(calls)) > 1:
        return _versus(calls)
    return f"{_cut(calls[0])}: {_versus([item.fields['value'] for item in items])}"


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
    for name in properties:
        found = [item.notes.get(name, "") for item in items]
        if len(set(found)) > 1:
            return f"{about}: {name} {_versus(found)}"
    return f"{about}: {_versus([spoken(item.fields['expression']) for item in items])}"


def _fields(items: Sequence[Item]) -> str:
    """The fields in which they differ, the first two."""
    first = items[0]
    differing = [name for name in first.fields if len({item.fields[name] for item in items}) > 1]
    if "op" in differing:
        return f"{first.about}: {_versus([item.fields['op'] for item in items])}"
    about = spoken(first.about) if first.kind == ItemKind.INPUT else f"{first.about} {first.fields['op']}"
    shown = [f"{_WORDS.get(name, name)} {_versus([item.fields[name] for item in items])}" for name in differing[:2]]
    return f"{about}: {', '.join(shown)}"


def _versus(texts: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(differing_part(texts)))


def differing_part(texts: Sequence[str]) -> list[str]:
    """What tells texts apart: of texts that fit on a line the whole, of longer ones the part around the difference."""
    is_short = max(map(len, texts)) <= _BRIEF
    if is_short or len(set(texts)) == 1:
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
    columns = enumerate(zip(*texts, strict=False))
    return next((at for at, column in columns if len(set(column)) > 1), min(map(len, texts)))


def _word_start(text: str, at: int) -> int:
    return max(text.rfind(mark, 0, at) + 1 for mark in " ,{")


def _word_end(text: str, at: int) -> int:
    found = [text.find(mark, at) for mark in " ,}"]
    return min((place for place in found if place >= 0), default=len(text))


def _cut(text: str) -> str:
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 3]}..."
