"""A program in which groups of ranks run the same ops in different orders -> its explanation, None for any other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.iterables import differ, find
from tpcompile.evidence.layers.moved_collectives import moved_collectives
from tpcompile.evidence.layers.node_text import called, nodes_in, read_instead
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation
from tpcompile.evidence.records import Item, Layer, UserLine
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.records.causes import Cause


def order_of_set(difference: Difference, row: Row) -> Explanation | None:
    """The same ops in the iteration order of a set, in code that does not read the rank."""
    if difference.compile.rank_reads():
        return None
    moved = _moved(difference.items)
    if moved is None:
        return None
    loop = _set_behind(difference, row)
    if loop is None:
        return None
    at_loop = Row(_in_loop(item, loop) for item in moved.present)
    return Explanation(Cause.SET_ORDER, Directness.ARRANGED, at_loop, _headline(difference.items, moved))


def order_of_ops(difference: Difference) -> Explanation | None:
    """The same collectives on the same values in a different order, or else the same ops.

    Where their sizes are equal, the schedule of the collectives is equal too: they combine different values.
    """
    items = nodes_in(difference.items)
    return _of_collectives(items) or _of_ops(items)


def _of_collectives(items: Items) -> Explanation | None:
    moved = moved_collectives(items)
    if moved is None:
        return None
    says = f"the same collectives in a different order: {read_instead(items, moved)}"
    return Explanation(Cause.ORDER_FORWARD, Directness.PROGRAM, moved, says)


def _of_ops(items: Items) -> Explanation | None:
    moved = _moved(items)
    if moved is None or moved.agree_in(op_of):
        return None
    return Explanation(Cause.RANK_BRANCH, Directness.PROGRAM, moved, _headline(items, moved))


def without_moved(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows without those of ops that every group runs, at different places; all rows where none is left."""
    alone = [row for row in rows if not row.is_full]
    owners: dict[object, set[int]] = {}
    for row in alone:
        owners.setdefault(op_of(row.first), set()).update(row.owners)
    left = [row for row in rows if row.is_full or len(owners[op_of(row.first)]) < len(row)]
    return left or rows


def op_of(node: Item) -> tuple[str, ...]:
    """What a node runs: equal for the same op with the same constants, whatever it reads."""
    fields = node.fields
    return fields.get("op", ""), fields.get("target", ""), node.notes.get("constants", "")


def _headline(items: Items, moved: Row) -> str:
    """The ops of the first place at which the order differs, or what the same op reads there."""
    if moved.agree_in(op_of):
        return f"the same ops in a different order: {called(moved.first)} of {read_instead(items, moved)}"
    ops = " / ".join(dict.fromkeys(map(called, moved.present)))
    return f"the same ops in a different order: {ops}"


def _moved(items: Items) -> Row | None:
    """The first place at which groups of ranks differ that run the same ops in different orders, or on the same values
    in different orders."""
    nodes = nodes_in(items)
    ops = nodes.map(_sorted_ops)
    if ops.differ() or not differ(ops[0]):
        return None
    moved = find(nodes.places(), lambda row: not row.agree_in(op_of))
    if moved is not None or nodes.map(_sorted_reads).differ():
        return moved
    return find(nodes.places(), lambda row: row.differs_in_note("reads"))


def _sorted_reads(nodes: Iterable[Item]) -> tuple[str, ...]:
    return tuple(sorted(" ".join(node.notes["reads"] for node in nodes).split()))


def _sorted_ops(nodes: Iterable[Item]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(map(op_of, nodes)))


def _set_behind(difference: Difference, row: Row) -> UserLine | None:
    """Where a set is iterated: in the function of the ops, else elsewhere in their file, in a loop that calls them."""
    guards = difference.compile.items(Layer.GUARDS)
    loops = lines_of(guards.only(lambda guard: "set" in guard.notes).all)
    near = [loop for loop in loops if _functions_in(loop.file, row)]
    return min(near, key=lambda loop: loop.function not in _functions_in(loop.file, row), default=None)


def _functions_in(file: str, row: Row) -> set[str]:
    """Functions of that file that the row's lines are in; torch may have cut the front of the file's path."""
    return {line.function for line in row.lines if line.file.endswith(file)}


def _in_loop(item: Item, iterated: UserLine) -> Item:
    """The item at the line that iterates the set, unless the item is in that function already."""
    is_there = item.line is not None and item.line.function == iterated.function
    return item if is_there else item.at(iterated)
