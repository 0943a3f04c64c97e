"""Collectives of a compiled graph, in issue order -> one item each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, Items, LayerSpec, Row
from tpcompile.evidence.records import Collective, CompileRecord, Item, ItemKind, Layer
from tpcompile.evidence.rows import rows_of

_CAUSES = {
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
    return (_item(collective) for collective in compile_.collectives)


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
    if not compile_.graphs:
        return ()
    has_lowered = any(graph.kind != "dynamo" for graph in compile_.graphs)
    is_lost = compile_.is_cut or any(event.endswith("_hit") for event in compile_.cache)
    is_early = compile_.is_cut and not compile_.guards
    return ("",) if (has_lowered or not is_lost) and not is_early else ()


def _explain(difference: Difference) -> Explanation:
    return explained(difference.items, difference.rows)


def explained(items: Items, rows: Sequence[Row]) -> Explanation:
    """Cause of collectives that do not match, and the first of them."""
    is_shifted = any(not row.is_full for row in rows)
    if is_shifted:
        rows = _in_place(items) or rows
    row = rows[0]
    pair = next((row for row in rows if row.is_full), None)
    cause = _cause(items, row, pair)
    if cause in (Cause.ORDER_FORWARD, Cause.ORDER_BACKWARD):
        row = next(row for row in map(Row, zip(*items, strict=True)) if row.differs)
    if cause == Cause.EXTRA_COLLECTIVE:
        row = next((_at_own_line(extra, items) for extra in rows if not extra.is_full), row)
    # Sizes and dtypes follow from what goes in; the rest is the program's own.
    is_result = cause == Cause.COLLECTIVE_SIZES
    directness = Directness.RESULT if is_result else Directness.COLLECTIVE
    guilty = _unwaited(row) if cause == Cause.UNWAITED else frozenset[int]()
    return Explanation(cause, directness, row, hangs=True, guilty=guilty)


def _at_own_line(extra: Row, items: Items) -> Row:
    """The extra one; of several that are equal the one at a line from which nobody else issues.

    Aligned by content, the last of them is taken for it.
    """
    lacking = [group for index, group in enumerate(items) if index not in extra.owners]
    theirs = {item.line for group in lacking for item in group}
    own = {}
    for index in extra.owners:
        equal = [item for item in items[index] if item.key == extra.first.key]
        own[index] = next((item for item in equal if item.line not in theirs), extra[index])
    return Row(own.get(index) for index in range(len(items)))


def _in_place(items: Items) -> Sequence[Row]:
    """Rows by position, where all groups issue the same ops in the same places; else nothing.

    Aligned by content, one that is not waited for is taken for an extra one before an equal one that is.
    """
    ops = [[item.fields["op"] for item in group] for group in items]
    if any(group != ops[0] for group in ops):
        return ()
    columns = [Row(column) for column in zip(*items, strict=True)]
    return [row for row in columns if row.differs]


def _unwaited(row: Row) -> frozenset[int]:
    """Groups that read a result which the others wait for."""
    return frozenset(index for index, item in enumerate(row) if item and item.fields["waited"] == str(False))


def _cause(items: Items, row: Row, pair: Row | None) -> Cause:
    # A group that nobody named is numbered by first appearance, so its number moves when collectives do.
    orders = [[_unnumbered(item) for item in group] for group in items]
    if all(order == orders[0] for order in orders):
        return Cause.GROUP
    counts = [Counter(order) for order in orders]
    if all(count == counts[0] for count in counts):
        return Cause.ORDER_BACKWARD if row.first.about == "backward" else Cause.ORDER_FORWARD
    is_longer = len({len(group) for group in items}) > 1
    if is_longer or pair is None:
        return Cause.EXTRA_COLLECTIVE
    return _field_cause(pair)


def _unnumbered(item: Item) -> tuple[str, ...]:
    # By name: a record that travelled between ranks has its fields in another order.
    names = sorted(item.fields)
    if item.fields["group"].startswith("group#"):
        names.remove("group")
    return (item.about, *(item.fields[name] for name in names))


def _field_cause(row: Row) -> Cause:
    """Cause by the first field in which collectives of one op differ."""
    if row.differs_in("op"):
        return Cause.EXTRA_COLLECTIVE
    differing = filter(row.differs_in, _CAUSES)
    return next((_CAUSES[name] for name in differing), Cause.EXTRA_COLLECTIVE)


def issued(difference: Difference) -> Explanation | None:
    """The same for the compile of another layer's difference; None when its collectives match."""
    if not difference.compile.differs(Layer.COLLECTIVES):
        return None
    items = difference.compile.items(Layer.COLLECTIVES)
    rows = rows_of(items, is_ordered=True)
    return explained(items, rows) if rows else None


SPEC = LayerSpec(layer=Layer.COLLECTIVES, explain=_explain, items=_items, parts=_parts)
