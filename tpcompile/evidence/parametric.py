"""Lowered items of several ranks -> the constants that follow the rank's coordinate, or None.

A healthy DTensor model differs here: vocabulary-shard bounds, the index of a split. Such a constant *addresses*
data (a bound, an offset, an index). One that *scales* data, a float or a factor of a float tensor, changes the
numbers and is never explained away, although two ranks would always fit a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from tpcompile.evidence.layerspec import Groups, Items, Row
from tpcompile.evidence.records import Item, ItemKind

_INTEGER = re.compile(r"(?<![\w.%#])-?\d+(?![\w.])")
_ADDRESSING = re.compile(
    r"^(?:torch\.ops\.aten\.)?(?:lt|le|gt|ge|eq|ne|getitem|slice|slice_scatter|select|select_scatter|narrow|"
    r"as_strided|index_select|arange|constant_pad_nd|clamp|clamp_min|clamp_max|bitwise_\w+)\b"
)
_INTEGER_VALUE = re.compile(r"^(?:DTensor\()?[iub]\d+\[")
_LOCAL_TENSOR = "._local_tensor"


def constants(items: Items, coordinates: Groups) -> list[Row] | None:
    """Rows of items that differ between ranks only in rank-parametric constants; None when anything else differs.

    `items[k]` are the lowered items of the ranks at `coordinates[k]`; each rank must be alone in its group.
    """
    if len({len(group) for group in items}) != 1 or any(len(places) > 1 for places in coordinates):
        return None
    places = [at for at, *_ in coordinates]
    rows = [row for row in zip(*items, strict=True) if len({item.key for item in row}) > 1]
    is_parametric = rows and all(_is_parametric(row, places) for row in rows)
    return [*rows] if is_parametric else None


def _is_parametric(row: Sequence[Item], coordinates: Sequence[int]) -> bool:
    if any(item.kind != ItemKind.NODE for item in row):
        return False
    calls = [(i.fields["op"], i.fields["target"], _INTEGER.sub("#", i.fields["args"]), i.fields["value"]) for i in row]
    if len(set(calls)) != 1:
        return False
    first = row[0].fields
    is_address = _ADDRESSING.match(first["target"]) or _INTEGER_VALUE.search(first["value"])
    numbers = [[int(number) for number in _INTEGER.findall(item.fields["args"])] for item in row]
    return bool(is_address) and all(_is_affine(column, coordinates) for column in zip(*numbers, strict=True))


def is_uneven_shard(row: Row, coordinates: Groups) -> bool:
    """True for the guard on the local tensor of a DTensor whose dimension the ranks do not divide.

    `row[k]` is what the ranks at `coordinates[k]` have: equal but for one size, which every rank but the last to hold
    anything has whole, as `torch.chunk` splits; strides follow the sizes.
    """
    found = [item for item in row if item is not None and item.about.endswith(_LOCAL_TENSOR) and "size" in item.notes]
    if len(found) < len(row) or len({_without_sizes(item) for item in found}) > 1:
        return False
    sizes = [_numbers(item, "size") for item in found]
    strides = [_numbers(item, "stride") for item in found]
    if len({len(size) for size in sizes}) > 1:
        return False
    uneven = [column for column in zip(*sizes, strict=True) if len(set(column)) > 1]
    has_one_layout = len({tuple(stride) for stride in strides}) == 1 or _are_contiguous(sizes, strides)
    return len(uneven) == 1 and has_one_layout and _is_chunked(uneven[0], coordinates)


def _without_sizes(item: Item) -> str:
    notes = item.notes
    says = item.fields["expression"]
    return says.replace(f"size=[{notes['size']}]", "").replace(f"stride=[{notes['stride']}]", "")


def _numbers(item: Item, name: str) -> list[int]:
    return [int(number) for number in _INTEGER.findall(item.notes[name])]


def _are_contiguous(sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> bool:
    expected = [[math.prod(size[dim + 1 :]) for dim in range(len(size))] for size in sizes]
    return expected == [list(stride) for stride in strides]


def _is_chunked(values: Sequence[int], coordinates: Groups) -> bool:
    """`4, 4, 3` or `4, 4, 1, 0` in the order of the coordinates: whole chunks, then the rest, then nothing."""
    by_coordinate = sorted((at, value) for value, places in zip(values, coordinates, strict=True) for at in places)
    in_order = [value for _, value in by_coordinate]
    held = [value for value in in_order if value]
    return in_order == sorted(in_order, reverse=True) and len(set(held[:-1])) <= 1


def _is_affine(values: Sequence[int], coordinates: Sequence[int]) -> bool:
    """value = a + b * coordinate, exactly, for one a and b."""
    pairs = sorted(zip(coordinates, values, strict=True))
    (x0, y0), (x1, y1) = pairs[0], pairs[-1]
    return all((y - y0) * (x1 - x0) == (y1 - y0) * (x - x0) for x, y in pairs)
