"""Lowered items, or guards, of several ranks -> those that follow the rank's coordinate.

Healthy DTensor models differ here: vocabulary-shard bounds, the index of a split. Such a constant *addresses* data
(a bound, an offset, an index). A constant that *scales* data, a float or a factor of a float tensor, changes the
numbers and is always reported, although the values of two ranks always fit a line.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.iterables import differ
from tpcompile.evidence.layers.spec import Difference, Followed
from tpcompile.evidence.records import Item, ItemKind, Layer

_INTEGER = re.compile(r"(?<![\w.%#])-?\d+(?![\w.])")
_ADDRESSING = re.compile(
    r"^(?:torch\.ops\.aten\.)?(?:lt|le|gt|ge|eq|ne|getitem|slice|slice_scatter|select|select_scatter|narrow|"
    r"as_strided|index_select|arange|constant_pad_nd|clamp|clamp_min|clamp_max|bitwise_\w+)\b"
)
_INTEGER_VALUE = re.compile(r"^(?:DTensor\()?[iub]\d+\[")
LOCAL_TENSOR = "._local_tensor"


def lowered_constants(difference: Difference) -> Followed:
    """Constants of lowered graphs, under equal collectives."""
    nothing = Followed(difference.rows)
    if difference.compile.differs(Layer.COLLECTIVES):
        return nothing
    rows = constants(difference.items, difference.compile.coordinates())
    if not rows:
        return nothing
    says = f"{len(rows)} lowered constant(s) follow the rank's coordinate under equal Dynamo graphs"
    return Followed((), rows, says)


def uneven_shards(difference: Difference) -> Followed:
    """Guards on shards of different sizes."""
    places = difference.compile.coordinates()
    rows = [row for row in difference.rows if is_uneven_shard(row, places)]
    says = f"{len(rows)} guard(s) on shards of different sizes: the ranks do not divide the dimension"
    return difference.following(rows, says)


def constants(items: Items, coordinates: Groups) -> list[Row]:
    """Rows of items that differ only in constants that follow the rank's coordinate; none when anything else differs.

    `items[k]` are the lowered items of the ranks at `coordinates[k]`; every group must have exactly one rank.
    """
    places = list(itertools.chain.from_iterable(coordinates))
    has_one_rank_each = len(places) == len(coordinates)
    if items.differ(len) or not has_one_rank_each:
        return []
    rows = items.differing()
    are_parametric = all(_is_parametric(row, places) for row in rows)
    return rows if are_parametric else []


def _is_parametric(row: Row, coordinates: Sequence[int]) -> bool:
    return addresses(row) and all(_is_affine(column, coordinates) for column in integer_columns(row))


def addresses(row: Row) -> bool:
    """True for nodes that differ only in integers, and use them to address data."""
    if not row.all_are(lambda item: item.kind == ItemKind.NODE) or not is_same_call(row):
        return False
    is_bound = _ADDRESSING.match(row.first.fields["target"]) is not None
    return is_bound or _INTEGER_VALUE.search(row.first.fields["value"]) is not None


def is_same_call(row: Row) -> bool:
    """True for nodes that differ in integers among their arguments, and in nothing else."""
    return row.agree_in(_call)


def integer_columns(row: Row) -> list[tuple[int, ...]]:
    """The integers among the arguments of equal nodes, each with its value in every group."""
    return list(zip(*(integers(item.fields["args"]) for item in row.present), strict=True))


def _call(item: Item) -> tuple[str, ...]:
    """A node without the integers among its arguments."""
    fields = item.fields
    return fields["op"], fields["target"], _INTEGER.sub("#", fields["args"]), fields["value"]


def integers(text: str) -> list[int]:
    """Integers in the text of arguments, without references to nodes."""
    return list(map(int, _INTEGER.findall(text)))


def is_uneven_shard(row: Row, coordinates: Groups) -> bool:
    """True for guards on the local tensor of a DTensor whose sharded dimension is not divisible by the ranks.

    `row[k]` is what the ranks at `coordinates[k]` have. They must be equal except for one size, split as `torch.chunk`
    does: whole chunks, then the rest, then nothing; strides follow the sizes.
    """
    differs_in_size = row.all_are(_is_local_tensor) and row.agree_in(_without_sizes)
    if not differs_in_size:
        return False
    sizes = list(map(integers, row.notes("size")))
    strides = list(map(integers, row.notes("stride")))
    if differ(map(len, sizes)) or not _have_one_layout(sizes, strides):
        return False
    uneven = list(filter(differ, zip(*sizes, strict=True)))
    return len(uneven) == 1 and _is_chunked(uneven[0], coordinates)


def _have_one_layout(sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> bool:
    """True where the strides are equal, or each are those of a contiguous tensor of its size."""
    are_equal = not differ(map(tuple, strides))
    return are_equal or list(strides) == list(map(_contiguous, sizes))


def _is_local_tensor(item: Item) -> bool:
    return item.about.endswith(LOCAL_TENSOR) and "size" in item.notes


def _without_sizes(item: Item) -> str:
    notes = item.notes
    says = item.fields["expression"]
    return says.replace(f"size=[{notes['size']}]", "").replace(f"stride=[{notes['stride']}]", "")


def _contiguous(size: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]


def _is_chunked(values: Sequence[int], coordinates: Groups) -> bool:
    """`4, 4, 3` or `4, 4, 1, 0` in the order of the coordinates: whole chunks, then the rest, then nothing."""
    value_at = {at: value for value, places in zip(values, coordinates, strict=True) for at in places}
    in_order = [value_at[at] for at in sorted(value_at)]
    whole = list(filter(None, in_order))[:-1]
    return in_order == sorted(in_order, reverse=True) and not differ(whole)


def _is_affine(values: Sequence[int], coordinates: Sequence[int]) -> bool:
    """value = a + b * coordinate, exactly, for one a and b."""
    pairs = sorted(zip(coordinates, values, strict=True))
    (x0, y0), (x1, y1) = pairs[0], pairs[-1]
    return all((y - y0) * (x1 - x0) == (y1 - y0) * (x - x0) for x, y in pairs)
