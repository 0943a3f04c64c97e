"""A wrong run and its single-device references -> the first module whose output is wrong, and the op in it.

A value of a trace is right where the reference has an equal one: whole, or the rank's part of it, or the sum over the
ranks. One whose shape has no counterpart in the reference is right where all that its op was given is right. From a
wrong output the search goes back through what is wrong, to the ops that were given nothing wrong. So what the
reference does not have (a packed projection of other widths, a partial sum) is not blamed where what is made of it is
right again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.evidence.records import Item, value_item
from tpcompile.numerics.agree import texts_of_all_ranks
from tpcompile.numerics.traced import Fingerprint, Trace, Value, traced

Outputs = dict[str, list[Tensor]]


def module_outputs(stack: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Run the stack in eager without gradients and keep every module's output tensors, in the order they finish."""
    outputs: Outputs = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            # Copies: an in-place collective of mode A or B overwrites what it is given.
            outputs[name] = [t.detach().clone() for t in tensors if isinstance(t, Tensor)]

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in stack.named_modules() if name]
    try:
        with torch.no_grad():
            stack(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def wrong_op(
    stack: nn.Module,
    inputs: tuple[Any, ...],
    references: Sequence[tuple[nn.Module, tuple[Any, ...]]],
    module: str,
    comm: TpComm,
    *,
    dtype: torch.dtype,
) -> Item | None:
    """The op that the wrong output of a module begins with; None when unknown. All ranks of the group must call it.

    `references` are the single-device modules with their inputs, in the dtype under test and in float64. A rank whose
    modules are right passes an empty name.
    """
    trace = traced(stack, inputs)
    device = next(stack.parameters()).device
    sums = sums_over_ranks(texts_of_all_ranks(as_text(trace), comm.group, device))
    known = Known.of(traced(single, given, rank=comm.rank, size=comm.size) for single, given in references)
    return first_wrong_op(trace, module, known, sums, dtype=dtype)


def first_wrong(
    got: Outputs, single: Outputs, exact: Outputs, *, rank: int, limit: float, size: int | None = None
) -> str:
    """Name of the first module, in the order they finish, whose error exceeds `limit` x the single-device error.

    A single-device error below a quarter ulp counts as a quarter ulp.

    An output that is sharded in `size` equal parts of the last dim (any number by default) is compared with the rank's
    slice; a different layout, such as replicated or padded heads, is left out. Empty when every module is right.
    """
    for name, tensors in got.items():
        for tensor, one, full in zip(tensors, single[name], exact[name], strict=True):
            columns = _columns(tensor.shape[-1], full.shape[-1], rank=rank, size=size)
            one, full = one[..., columns], full[..., columns]
            if tensor.shape != full.shape:
                continue
            normal = float((one.double() - full).norm())
            error = float((tensor.double() - full).norm())
            floor = torch.finfo(tensor.dtype).eps / 4 * float(full.norm())
            if not error <= limit * max(normal, floor):  # NaN is wrong
                return name
    return ""


def _columns(width: int, whole: int, *, rank: int, size: int | None) -> slice:
    """The rank's part of the last dim, `width` of `whole`; all of it when it is not sharded in equal parts."""
    is_equal_part = size is None or width * size == whole
    end = (rank + 1) * width
    if not is_equal_part or end > whole:
        return slice(None)
    return slice(end - width, end)


_ROUNDINGS = 8
"""Times the precision of the dtype by which equal values may differ: a run rounds many times, in its own order."""
_LEAST = 1e-5

Shape = tuple[int, ...]


@dataclass
class Known:
    """Fingerprints of the references, by shape."""

    whole: dict[Shape, list[Fingerprint]] = field(default_factory=dict)
    parts: dict[Shape, list[Fingerprint]] = field(default_factory=dict)

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> Known:
        """The fingerprints of all values of these traces."""
        known = cls()
        values: list[Value] = []
        for trace in traces:
            values += trace.values
        for value in values:
            if value.tensor is not None:
                same_shape = known.whole.setdefault(value.shape, [])
                same_shape.append(value.tensor)
            for shape, numbers in value.parts:
                same_shape = known.parts.setdefault(shape, [])
                same_shape.append(numbers)
        return known


def as_text(trace: Trace) -> str:
    """What the other ranks need of a trace: `sums_over_ranks` reads it."""
    return json.dumps([[value.name, value.shape, value.tensor] for value in trace.values])


def sums_over_ranks(texts: Sequence[str]) -> list[Fingerprint | None]:
    """Fingerprints of the sums over all ranks, value by value; empty where ranks did not run the same ops."""
    ranks = list(map(json.loads, texts))
    ops = [[(name, shape) for name, shape, _ in values] for values in ranks]
    if ops.count(ops[0]) < len(ops):
        return []
    found: list[Fingerprint | None] = []
    for values in zip(*ranks, strict=True):
        numbers = [fingerprint for _, _, fingerprint in values]
        is_known = None not in numbers
        found.append(tuple(map(sum, zip(*numbers, strict=True))) if is_known else None)
    return found


class _Judged(Enum):
    WHOLE = auto()
    """Equal to a value of the reference."""
    PART = auto()
    """Equal to the rank's part of one; or without a counterpart, and made of nothing wrong."""
    PARTIAL = auto()
    """Right as the sum over the ranks."""
    WRONG = auto()


UNSUMMED = "its result is right only when it is summed over the ranks"


def first_wrong_op(
    trace: Trace, module: str, known: Known, sums: Sequence[Fingerprint | None], *, dtype: torch.dtype
) -> Item | None:
    """The first op, or tensor that was given, from which the wrong outputs of a run come; None when unknown.

    `module` is a module with wrong outputs, for a run whose own outputs are right.
    """
    values = trace.values
    tolerance = max(_ROUNDINGS * torch.finfo(dtype).eps, _LEAST)
    judged = _all_judged(values, known, sums, tolerance=tolerance)
    of_the_run, of_the_module = trace.outputs.get("", []), trace.outputs.get(module, [])
    for outputs in (of_the_run, of_the_module):
        wrong = _behind(outputs, values, judged, _Judged.WRONG)
        origins = [place for place in wrong if wrong.isdisjoint(values[place].sources)]
        if origins:
            return _origin_item(min(origins), values, judged)
        partial = [place for place in outputs if judged[place] == _Judged.PARTIAL]
        if partial:
            value = _divided_behind(partial, values, judged) or values[partial[0]]
            return value_item(value.name, UNSUMMED, line=value.line)
    return None


def _origin_item(place: int, values: Sequence[Value], judged: Sequence[_Judged]) -> Item:
    value = values[place]
    partial = [values[source] for source in value.sources if judged[source] == _Judged.PARTIAL]
    divided = _divided_behind(value.sources, values, judged)
    if divided is not None:
        return value_item(divided.name, f"{UNSUMMED}, and is used without it", line=divided.line)
    what = "its result" if value.sources else "this tensor"
    text = f"{what} has no equal in the single-device run"
    if partial:
        text += f"; it was given the result of {partial[0].name} at {partial[0].line} without its sum over the ranks"
    return value_item(value.name, text, line=value.line)


def _divided_behind(places: Iterable[int], values: Sequence[Value], judged: Sequence[_Judged]) -> Value | None:
    """The first value behind these that its op made partial: it was given whole tensors only, or is a collective."""
    for place in sorted(_behind(places, values, judged, _Judged.PARTIAL)):
        value = values[place]
        is_made_of_whole = all(judged[source] == _Judged.WHOLE for source in value.sources)
        if is_made_of_whole or value.name.startswith("_c10d_functional."):
            return value
    return None


def _all_judged(
    values: Sequence[Value], known: Known, sums: Sequence[Fingerprint | None], *, tolerance: float
) -> list[_Judged]:
    found: list[_Judged] = []
    for place, value in enumerate(values):
        whole = known.whole.get(value.shape, [])
        parts = known.parts.get(value.shape, [])
        total = sums[place] if sums else None
        has_counterpart = bool(whole or parts)
        if value.tensor is None or not has_counterpart:  # it is judged as what it was made of
            sources = [found[source] for source in value.sources]
            found.append(_Judged.WRONG if _Judged.WRONG in sources else _Judged.PART)
        elif _is_among(value.tensor, whole, tolerance):
            found.append(_Judged.WHOLE)
        elif _is_among(value.tensor, parts, tolerance):
            found.append(_Judged.PART)
        elif total is not None and _is_among(total, whole, tolerance):
            found.append(_Judged.PARTIAL)
        else:
            found.append(_Judged.WRONG)
    return found


def _behind(places: Iterable[int], values: Sequence[Value], judged: Sequence[_Judged], wanted: _Judged) -> set[int]:
    """The places that are judged `wanted`, and all that are so judged of what they were made from."""
    found: set[int] = set()
    left = list(places)
    while left:
        place = left.pop()
        if judged[place] == wanted and place not in found:
            found.add(place)
            left += values[place].sources
    return found


def _is_among(numbers: Fingerprint, candidates: Iterable[Fingerprint], tolerance: float) -> bool:
    """True where one of the candidates is equal up to the tolerance, relative to the candidate's norm."""
    for wanted in candidates:
        apart = sum((one - other) ** 2 for one, other in zip(numbers, wanted, strict=True))
        size = sum(number**2 for number in wanted)
        if apart <= tolerance**2 * size:
            return True
    return False
