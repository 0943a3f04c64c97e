from __future__ import annotations

from tpcompile.evidence.groups.by_group import Items
from tpcompile.evidence.layers.collectives import explained
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.records import Item, ItemKind
from tpcompile.evidence.records.causes import Cause


def issued(phase: str, reduce_op: str, shape: str) -> Item:
    fields = {
        "op": "all_reduce",
        "reduce_op": reduce_op,
        "src": "-",
        "dtype": "f32",
        "shape": shape,
        "group": "tp",
        "waited": "True",
    }
    return Item(kind=ItemKind.COLLECTIVE, about=phase, fields=fields)


def test_a_backward_that_one_rank_lacks_follows_from_the_different_reduce_op_of_its_forward() -> None:
    """A max has no gradient, so the compile of that rank ends before its backward."""
    sums, most = issued("forward", "sum", "[2, 2]"), issued("forward", "max", "[2, 2]")
    output = issued("forward", "sum", "[2, 16]")
    backward = issued("backward", "sum", "[2, 16]")
    items = Items([(sums, output, sums, output, backward), (most, output, most, output)])
    found = explained(items, rows_of(items, is_ordered=True))
    assert (found.cause, tuple(found.row)) == (Cause.REDUCE_OP, (sums, most))
    equal = Items([(sums, output, backward), (sums, output)])
    found = explained(equal, rows_of(equal, is_ordered=True))
    assert (found.cause, tuple(found.row)) == (Cause.EXTRA_COLLECTIVE, (backward, None))
