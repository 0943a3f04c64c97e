"""Collectives of a compiled graph, in issue order -> one item each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.evidence.bygroup import Items, Row
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, LayerSpec, in_one_part
from tpcompile.evidence.records import Collective, CompileRecord, Item, ItemKind, Layer
from tpcompile.evidence.rows import rows_of
from tpcompile.evidence.several import find, first

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
    is_shifted = not all(row.is_full for row in rows)
    if is_shifted and not items.each(_op).differ():
        # Aligned by content, one that is not waited for is taken for an extra one before an equal one that is.
        rows = items.differing()
    cause = _cause(items, rows)
    row = rows[0]
    if cause in (Cause.ORDER_FORWARD, Cause.ORDER_BACKWARD):
        row = items.differing()[0]
    elif cause == Cause.EXTRA_COLLECTIVE:
        row = _extra(items, rows)
    # Sizes and dtypes follow from what goes in, and the backward from what recomputes; the rest is the program's own.
    follows = cause == Cause.COLLECTIVE_SIZES or _is_recomputed(cause, row)
    directness = Directness.RESULT if follows else Directness.COLLECTIVE
    guilty = row.where(_is_unwaited) if cause == Cause.UNWAITED else frozenset[int]()
    return Explanation(cause, directness, row, hangs=True, guilty=guilty)


def _op(item: Item) -> str:
    return item.fields["op"]


def _is_unwaited(item: Item | None) -> bool:
    """True where a group reads a result which the others wait for."""
    return item is not None and item.fields["waited"] == str(False)


def _extra(items: Items, rows: Sequence[Row]) -> Row:
    """The first one that not all groups issue; of several that are equal the one at a line of its own.

    Aligned by content, the last of them is taken for it; from the line of its own nobody else issues.
    """
    extra = find(rows, lambda row: not row.is_full)
    if extra is None:
        return rows[0]
    lacking = items.picked(extra.where(lambda item: item is None))
    theirs = {item.line for item in lacking.all}
    wanted = extra.first.key
    own = items.only(lambda item: item.key == wanted and item.line not in theirs).map(first)
    return Row(found and (at_line or found) for found, at_line in zip(extra, own, strict=True))


def _cause(items: Items, rows: Sequence[Row]) -> Cause:
    # A group that nobody named is numbered by first appearance, so its number moves when collectives do.
    orders = items.each(_unnumbered)
    if not orders.differ():
        return Cause.GROUP
    if not orders.differ(lambda issued: tuple(sorted(issued))):
        return Cause.ORDER_BACKWARD if rows[0].first.about == "backward" else Cause.ORDER_FORWARD
    pair = find(rows, lambda row: row.is_full)
    if pair is None or items.differ(len):
        return Cause.EXTRA_COLLECTIVE
    return _CAUSES[first(pair.differing(_CAUSES)) or "op"]


def _unnumbered(item: Item) -> tuple[str, ...]:
    # By name: a record that travelled between ranks has its fields in another order.
    names = sorted(item.fields)
    if item.fields["group"].startswith("group#"):
        names.remove("group")
    return (item.about, *(item.fields[name] for name in names))


def issued(difference: Difference) -> Explanation | None:
    """The same for the compile of another layer's difference; None when its collectives match."""
    if not difference.compile.differs(Layer.COLLECTIVES):
        return None
    items = difference.compile.items(Layer.COLLECTIVES)
    rows = rows_of(items, is_ordered=True)
    return explained(items, rows) if rows else None


SPEC = LayerSpec(layer=Layer.COLLECTIVES, explain=_explain, items=_items, parts=_parts)
