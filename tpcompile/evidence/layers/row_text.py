"""A row of items -> the difference, in one line and never cut where they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.groups.by_rank import Groups, ranks_in
from tpcompile.evidence.iterables import differ, find, num_equal
from tpcompile.evidence.records import Item, ItemKind
from tpcompile.evidence.text.ranks import named_ranks

_BRIEF = 160
_SCOPE = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_ENVIRON = re.compile(r"\bos\.environ\._data\[b'(\w+)'\]")
_EXPLANATION = "Explanation: "
"""The mark before torch's explanation of a graph break."""
_WORD_END = re.compile(r"[ ,}]")
_WORD = re.compile(r"[a-zA-Z]")
_OPENS = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)
_WORDS = {"dynamic": "dynamic marks"}


def headline(row: Row, groups: Groups) -> str:
    """`autocast cpu: off / on`, or what only some ranks have."""
    if not row.present:
        return "the ranks differ"
    item = row.first
    if row.is_full:
        between = _BETWEEN.get(item.kind)
        return between(row) if between else f"{item.about}: {_versus(item.says for item in row.present)}"
    alone = _ALONE.get(item.kind)
    text = alone(item) if alone else _cut(f"{item.about}: {item.says}")
    owners = ranks_in(groups, row.owners)
    return f"{text}, on {named_ranks(owners)} only"


def spoken(source: str) -> str:
    """A source as the user would write it: `L['self']._modules['head']._parameters['weight']` is `self.head.weight`."""
    own = _MEMBER.sub(r".\1", _SCOPE.sub(r"\1", source))
    return _ENVIRON.sub(r"os.environ['\1']", own)


def _nodes(row: Row) -> str:
    """The calls, or the values of equal calls; a Triton kernel that all of these nodes launch is named before them."""
    calls = list(map(_call, row.present))
    if not differ(calls):
        return f"{_cut(calls[0])}: {_versus(row.values('value'))}"
    versus = _versus(calls)
    if not _WORD.search(versus):
        versus = f"{row.first.fields['target']} reads {versus}"
    kernel = row.first.notes.get("kernel", "")
    if kernel and not row.differs_in_note("kernel"):
        versus = f"{kernel}: {versus}"
    return versus


def _launches(row: Row) -> str:
    """Two launches, or the numbers of buffers that one and the same writes."""
    found = [item.says for item in row.present]
    if differ(found):
        return f"{row.first.about}: {_versus(found)}"
    return f"{_cut(found[0])}: writes {_versus(row.values('writes'))} buffers"


def _call(item: Item) -> str:
    """`mul(%1, 3)`; an input is named as such."""
    op, target = item.fields["op"], item.fields["target"]
    call = f"{target}({item.fields['args']})"
    texts = {"placeholder": f"input {target}", "get_attr": f"attribute {target}", "call": call}
    return texts.get(op, f"{op} {call}")


def _guards(row: Row) -> str:
    notes = row.first.notes
    if row.has_all("value"):
        subject = notes.get("subject", row.first.about)
        return f"{spoken(subject)} == {_versus(row.notes('value'))}"
    about = f"guard on {spoken(row.first.about)}"
    properties = notes if "keys" in notes else {}
    differing = find(properties, row.differs_in_note)
    if differing:
        return f"{about}: {differing} {_versus(row.notes(differing))}"
    return f"{about}: {_versus(map(spoken, row.values('expression')))}"


def _fields(row: Row) -> str:
    """The fields in which an input or a collective differs, the first two."""
    first = row.first
    differing = row.differing(first.fields)
    if "op" in differing:
        return f"{first.about}: {_versus(row.values('op'))}"
    is_input = first.kind == ItemKind.INPUT
    about = spoken(first.about) if is_input else f"{first.about} {first.fields['op']}"
    shown: list[str] = []
    for name in differing[:2]:
        word = _WORDS.get(name, name)
        shown.append(f"{word} {_versus(row.values(name))}")
    return f"{about}: {', '.join(shown)}"


def _versus(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(differing_part(list(texts))))


def differing_part(texts: Sequence[str]) -> list[str]:
    """The difference between texts: short texts whole, of longer ones the part around the difference."""
    is_short = max(map(len, texts)) <= _BRIEF
    if is_short or not differ(texts):
        return list(map(_cut, texts))
    parts = _differing_words(texts)
    shown_from = max(0, num_equal(parts) - _BRIEF // 2)
    return [_cut(part[shown_from:]) for part in parts]


def _differing_words(texts: Sequence[str]) -> list[str]:
    """The texts without their common start and end, in whole words: `dtype=float32`, not `32`."""
    num_before = num_equal(texts)
    reversed_rests = [text[num_before:][::-1] for text in texts]
    num_behind = num_equal(reversed_rests)
    start = max(texts[0].rfind(mark, 0, num_before) + 1 for mark in " ,{")
    found: list[str] = []
    for text in texts:
        word_end = _WORD_END.search(text, len(text) - num_behind)
        end = word_end.start() if word_end else len(text)
        found.append(text[start : _closed(text, start, end)])
    return found


def _closed(text: str, start: int, end: int) -> int:
    """`end`, moved behind the brackets that were opened since `start`: `grid=[(24, 1, 1)]`, not `grid=[(24`."""
    num_open = sum(_OPENS.get(character, 0) for character in text[start:end])
    for place in range(end, len(text)):
        if num_open <= 0:
            return place
        num_open += _OPENS.get(text[place], 0)
    return len(text)


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
"""Kind -> the text of an item that only some ranks have."""
_BETWEEN: Mapping[ItemKind, Callable[[Row], str]] = {
    ItemKind.NODE: _nodes,
    ItemKind.GUARD: _guards,
    ItemKind.INPUT: _fields,
    ItemKind.COLLECTIVE: _fields,
    ItemKind.LAUNCH: _launches,
}
"""Kind -> the text of items about one thing that differ."""
