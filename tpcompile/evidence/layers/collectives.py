"""Collectives of a compiled graph, in issue order -> one item each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, Items, LayerSpec, Row, in_one_part
from tpcompile.evidence.records import Collective, CompileRecord, Item, ItemKind, Layer, UserLine
from tpcompile.evidence.rows import differing_places, rows_of
from tpcompile.evidence.several import differ, first

_CAUSES = {
    "op": Cause.EXTRA_COLLECTIVE,
    "group": Cause.GROUP,
    "reduce_op": Cause.REDUCE_OP,
    "dtype": Cause.COLLECTIVE_SIZES,
    "shape": Cause.COLLECTIVE_SIZES,
    "waited": Cause.UNWAITED,
}
"""Field that differs -> cause, the one that says most first."""
UNUSED = "result is dropped"
"""Note of a collective whose result nobody reads: another edge of the graph, the schedule is the same."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    return map(_item, compile_.collectives)


def _item(collective: Collective) -> Item:
    fields = {
        "op": collective.op,
        "reduce_op": collective.reduce_op or "-",
        "dtype": collective.dtype,
        "shape": collective.shape,
        "group": collective.group,
        "waited": str(collective.waited),
    }
    notes = {} if collective.used else {UNUSED: "yes"}
    about = collective.phase
    return Item(kind=ItemKind.COLLECTIVE, about=about, fields=fields, notes=notes, line=collective.line)


def _parts(compile_: CompileRecord) -> Sequence[str]:
    """A rank that loaded its code from a cache has the Dynamo graph only, whose collectives are worded differently."""
    is_begun = bool(compile_.graphs) and (bool(compile_.guards) or not compile_.is_cut)
    is_lost = compile_.is_cut or compile_.is_loaded
    return in_one_part(is_observed=is_begun and (compile_.has_lowered or not is_lost))


def _explain(difference: Difference) -> Explanation:
    return explained(difference.items, difference.rows)


def _is_recomputed(cause: Cause, row: Row) -> bool:
    """True for a collective that some ranks issue in the backward only, where they run the forward again."""
    return cause == Cause.EXTRA_COLLECTIVE and row.distinct(lambda item: item.about) == {"backward"}


def explained(items: Items, rows: Sequence[Row]) -> Explanation:
    """Cause of collectives that do not match, and the first of them."""
    if not all(map(attrgetter("is_full"), rows)):
        rows = _in_place(items) or rows
    cause = _cause(items, rows)
    show = _SHOWN.get(cause)
    row = show(items, rows) if show else rows[0]
    # Sizes and dtypes follow from what goes in, and the backward from what recomputes; the rest is the program's own.
    follows = cause == Cause.COLLECTIVE_SIZES or _is_recomputed(cause, row)
    directness = Directness.RESULT if follows else Directness.COLLECTIVE
    guilty = _unwaited(row) if cause == Cause.UNWAITED else frozenset[int]()
    return Explanation(cause, directness, row, hangs=True, guilty=guilty)


def _first_place(items: Items, _rows: Sequence[Row]) -> Row:
    return differing_places(items)[0]


def _extra(items: Items, rows: Sequence[Row]) -> Row:
    """The first one that not all groups issue; of several that are equal the one at a line of its own.

    Aligned by content, the last of them is taken for it; from the line of its own nobody else issues.
    """
    extra = first(itertools.filterfalse(attrgetter("is_full"), rows))
    if extra is None:
        return rows[0]
    lacking = [group for item, group in zip(extra, items, strict=True) if item is None]
    theirs = set(map(attrgetter("line"), itertools.chain.from_iterable(lacking)))
    key = extra.first.key
    return Row(_of_own_line(item, group, key, theirs) for item, group in zip(extra, items, strict=True))


def _of_own_line(
    item: Item | None, group: Sequence[Item], key: tuple[str, ...], theirs: set[UserLine | None]
) -> Item | None:
    if item is None:
        return None
    equal = (other for other in group if other.key == key)
    return first(other for other in equal if other.line not in theirs) or item


_SHOWN = {
    Cause.ORDER_FORWARD: _first_place,
    Cause.ORDER_BACKWARD: _first_place,
    Cause.EXTRA_COLLECTIVE: _extra,
}
"""Causes that another row shows than the first."""


def _in_place(items: Items) -> Sequence[Row]:
    """Rows by position, where all groups issue the same ops in the same places; else nothing.

    Aligned by content, one that is not waited for is taken for an extra one before an equal one that is.
    """
    return () if differ(map(_ops, items)) else differing_places(items)


def _ops(group: Sequence[Item]) -> tuple[str, ...]:
    return tuple(item.fields["op"] for item in group)


def _unwaited(row: Row) -> frozenset[int]:
    """Groups that read a result which the others wait for."""
    return frozenset(index for index in row.owners if row.picked([index]).first.fields["waited"] == str(False))


def _cause(items: Items, rows: Sequence[Row]) -> Cause:
    # A group that nobody named is numbered by first appearance, so its number moves when collectives do.
    orders = [tuple(map(_unnumbered, group)) for group in items]
    pair = first(filter(attrgetter("is_full"), rows))
    if not differ(orders):
        return Cause.GROUP
    if not differ(map(tuple, map(sorted, orders))):
        return Cause.ORDER_BACKWARD if rows[0].first.about == "backward" else Cause.ORDER_FORWARD
    is_longer = differ(map(len, items))
    return Cause.EXTRA_COLLECTIVE if is_longer or pair is None else _field_cause(pair)


def _unnumbered(item: Item) -> tuple[str, ...]:
    # By name: a record that travelled between ranks has its fields in another order.
    names = sorted(item.fields)
    if item.fields["group"].startswith("group#"):
        names.remove("group")
    return (item.about, *(item.fields[name] for name in names))


def _field_cause(row: Row) -> Cause:
    """Cause by the first field in which collectives of one op differ."""
    differing = filter(row.differs_in, _CAUSES)
    return _CAUSES[next(differing, "op")]


def issued(difference: Difference) -> Explanation | None:
    """The same for the compile of another layer's difference; None when its collectives match."""
    if not difference.compile.differs(Layer.COLLECTIVES):
        return None
    items = difference.compile.items(Layer.COLLECTIVES)
    rows = rows_of(items, is_ordered=True)
    return explained(items, rows) if rows else None


SPEC = LayerSpec(layer=Layer.COLLECTIVES, explain=_explain, items=_items, parts=_parts)
