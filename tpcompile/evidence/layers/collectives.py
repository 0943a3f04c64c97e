"""Collectives of a compiled graph, in issue order -> one item each."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.iterables import find, first
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec, in_one_part
from tpcompile.evidence.records import CompileRecord, Item, ItemKind, Layer
from tpcompile.evidence.records.causes import Cause

_CAUSES = {
    "op": Cause.EXTRA_COLLECTIVE,
    "group": Cause.GROUP,
    "reduce_op": Cause.REDUCE_OP,
    "src": Cause.BROADCAST_SOURCE,
    "dtype": Cause.COLLECTIVE_SIZES,
    "shape": Cause.COLLECTIVE_SIZES,
    "waited": Cause.UNWAITED,
}
"""Field that differs -> cause, the most telling field first."""
_ORDERS = {"forward": Cause.ORDER_FORWARD, "backward": Cause.ORDER_BACKWARD}
"""Phase in which the same collectives are issued in different orders -> cause."""
UNUSED = "result is dropped"
"""Note of a collective whose result nothing reads: an edge of the graph differs, the schedule does not."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    for collective in compile_.collectives:
        fields = {
            "op": collective.op,
            "reduce_op": collective.reduce_op or "-",
            "src": collective.src or "-",
            "dtype": collective.dtype,
            "shape": collective.shape,
            "group": collective.group,
            "waited": str(collective.waited),
        }
        notes = {}
        if not collective.used:
            notes[UNUSED] = "yes"
        about = collective.phase
        callers = compile_.callers(collective.line)
        yield Item(
            kind=ItemKind.COLLECTIVE, about=about, fields=fields, notes=notes, line=collective.line, callers=callers
        )


def _parts(compile_: CompileRecord) -> Sequence[str]:
    """Observed where the graphs are complete.

    A rank that loaded its code from a cache has the Dynamo graph only, which spells collectives differently.
    """
    is_begun = bool(compile_.graphs) and (bool(compile_.guards) or not compile_.is_cut)
    is_partial = compile_.is_cut or compile_.is_loaded
    return in_one_part(is_observed=is_begun and (compile_.has_lowered or not is_partial))


def explained(items: Items, rows: Sequence[Row]) -> Explanation:
    """Cause of collectives that do not match, and the first of them; a backward follows from its forward."""
    forward = items.only(lambda item: item.about == "forward")
    if forward.each(lambda item: item.key).differ():
        items, rows = forward, rows_of(forward, is_ordered=True)
    is_shifted = not all(row.is_full for row in rows)
    ops = items.each(lambda item: item.fields["op"])
    if is_shifted and not ops.differ():
        # Aligned by content, a collective that is not waited for looks like an extra one before an equal one that is.
        rows = items.differing()
    cause = _cause(items, rows)
    row = rows[0]
    directness = Directness.COLLECTIVE
    guilty = frozenset[int]()
    if cause == Cause.EXTRA_COLLECTIVE:
        row = _extra(items, rows)
        if row.distinct(lambda item: item.about) == {"backward"}:
            directness = Directness.RESULT  # some ranks recompute the forward, where the reason is
    elif cause == Cause.COLLECTIVE_SIZES:
        directness = Directness.RESULT  # sizes and dtypes follow from the operands
    elif cause in _ORDERS.values():
        row = items.differing()[0]
    elif cause == Cause.UNWAITED:
        guilty = row.where(lambda item: item and item.fields["waited"] == str(False))
    return Explanation(cause, directness, row, hangs=True, guilty=guilty)


def _extra(items: Items, rows: Sequence[Row]) -> Row:
    """The first collective that some groups do not issue.

    Alignment by content takes the last of several equal ones. The extra one is that at a line from which the groups
    that lack it issue nothing.
    """
    extra = find(rows, lambda row: not row.is_full)
    if extra is None:
        return rows[0]
    wanted = extra.first.key
    lacking = items.picked(extra.where(lambda item: item is None))
    their_lines = set(map(operator.attrgetter("line"), lacking.all))
    equal = items.only(lambda item: item.key == wanted)
    at_own_line = equal.only(lambda item: item.line not in their_lines).map(first)
    pairs = zip(at_own_line, extra, strict=True)
    return Row(own or aligned for own, aligned in pairs)


def _cause(items: Items, rows: Sequence[Row]) -> Cause:
    # A group without a role is numbered by first appearance, so its number moves when collectives do.
    orders = items.each(_unnumbered)
    if not orders.differ():
        return Cause.GROUP
    if not orders.differ(lambda issued: tuple(sorted(issued))):
        return _ORDERS[rows[0].first.about]
    pair = find(rows, lambda row: row.is_full)
    if pair is None or items.differ(len):
        return Cause.EXTRA_COLLECTIVE
    fields = pair.differing(_CAUSES)
    return _CAUSES[fields[0]] if fields else Cause.EXTRA_COLLECTIVE


def _unnumbered(item: Item) -> tuple[str, ...]:
    # By name: a record that travelled between ranks has its fields in a different order.
    names = sorted(item.fields)
    if item.fields["group"].startswith("group#"):
        names.remove("group")
    return (item.about, *(item.fields[name] for name in names))


def issued(difference: Difference) -> Explanation | None:
    """Explanation by the collectives of the same compile, for a different layer; None when they match."""
    if not difference.compile.differs(Layer.COLLECTIVES):
        return None
    items = difference.compile.items(Layer.COLLECTIVES)
    rows = rows_of(items, is_ordered=True)
    if not rows:
        return None
    return explained(items, rows)


SPEC = LayerSpec(explain=lambda difference: explained(difference.items, difference.rows), items=_items, parts=_parts)
