"""Lowered items of several ranks -> the constants that follow the rank's coordinate, or None.

A healthy DTensor model differs here: vocabulary-shard bounds, the index of a split. Such a constant *addresses*
data (a bound, an offset, an index). One that *scales* data, a float or a factor of a float tensor, changes the
numbers and is never explained away, although two ranks would always fit a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from tpcompile.evidence.digest import SEPARATOR
from tpcompile.evidence.records import Item

_INTEGER = re.compile(r"(?<![\w.%#])-?\d+(?![\w.])")
_SHAPE_AND_REFERENCE = re.compile(r"-> .*$")
_ADDRESSING = re.compile(
    r"^call (?:torch\.ops\.aten\.)?(?:lt|le|gt|ge|eq|ne|getitem|slice|slice_scatter|select|select_scatter|narrow|"
    r"as_strided|index_select|arange|constant_pad_nd|clamp|clamp_min|clamp_max|bitwise_\w+)\b"
)
_LOCAL_TENSOR = re.compile(
    r"^(?P<head>\S*\._local_tensor :: TENSOR_MATCH: .*\bsize=)\[(?P<size>[\d, ]*)\](?P<tail>, stride=)"
    r"\[(?P<stride>[\d, ]*)\]\)?$"
)
_INTEGER_VALUE = re.compile(r"-> (?:DTensor\()?[iub]\d+\[")


def constants(items: Sequence[Sequence[Item]], coordinates: Sequence[int]) -> list[tuple[Item, ...]] | None:
    """Rows of items that differ between ranks only in rank-parametric constants; None when anything else differs.

    `items[k]` are the lowered items of the rank at `coordinates[k]`; each rank is alone in its group.
    """
    if len({len(group) for group in items}) != 1:
        return None
    rows = [row for row in zip(*items, strict=True) if len({item.text for item in row}) > 1]
    return rows if rows and all(_is_parametric(row, coordinates) for row in rows) else None


def _is_parametric(row: Sequence[Item], coordinates: Sequence[int]) -> bool:
    calls = [item.text.partition(SEPARATOR)[2] for item in row]
    skeletons = {_INTEGER.sub("#", _SHAPE_AND_REFERENCE.sub("", call)) for call in calls}
    values = {call.rpartition("-> ")[2] for call in calls}
    if len(skeletons) != 1 or len(values) != 1:
        return False
    if not (_ADDRESSING.match(calls[0]) or _INTEGER_VALUE.search(calls[0])):
        return False
    columns = zip(*([int(n) for n in _INTEGER.findall(_SHAPE_AND_REFERENCE.sub("", c))] for c in calls), strict=True)
    return all(_is_affine(column, coordinates) for column in columns)


def is_uneven_shard(row: Sequence[Item | None], coordinates: Sequence[Sequence[int]]) -> bool:
    """True for the guard on the local tensor of a DTensor whose dimension the ranks do not divide.

    `row[k]` is what the ranks at `coordinates[k]` have: equal but for one size, which every rank but the last to hold
    anything has whole, as `torch.chunk` splits; strides follow the sizes.
    """
    found = [match for item in row if item and (match := _LOCAL_TENSOR.match(item.text))]
    if len(found) < len(row) or len({(m["head"], m["tail"]) for m in found}) > 1:
        return False
    sizes = [[int(n) for n in _INTEGER.findall(m["size"])] for m in found]
    strides = [[int(n) for n in _INTEGER.findall(m["stride"])] for m in found]
    if len({len(size) for size in sizes}) > 1:
        return False
    uneven = [dim for dim, column in enumerate(zip(*sizes, strict=True)) if len(set(column)) > 1]
    fits = len(uneven) == 1 and (_are_contiguous(sizes, strides) or len({tuple(s) for s in strides}) == 1)
    return fits and _is_chunked([size[uneven[0]] for size in sizes], coordinates)


def _are_contiguous(sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> bool:
    return all(
        list(stride) == [math.prod(size[dim + 1 :]) for dim in range(len(size))]
        for size, stride in zip(sizes, strides, strict=True)
    )


def _is_chunked(values: Sequence[int], coordinates: Sequence[Sequence[int]]) -> bool:
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
