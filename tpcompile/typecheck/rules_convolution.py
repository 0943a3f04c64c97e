"""Convolution -> type of its result: channels are contracted like the features of a linear, places need neighbours."""

# N batch, C channels, S places (one or more dims); weight [C out, C in / groups, kernel...]
from __future__ import annotations

from dataclasses import replace

from tpcompile.typecheck.layout import crosses
from tpcompile.typecheck.rules_matmul import einsum_type
from tpcompile.typecheck.rules_pointwise import sum_of
from tpcompile.typecheck.spmd import UNKNOWN, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, rule

_OVER_CHANNELS = ("niabc", "oixyz", "noabc")
"""x, weight, result; a, b, c are places and x, y, z those of the kernel."""
_WITHIN_CHANNELS = ("niabc", "iwxyz", "niabc")


@rule("aten.convolution")
def _convolution(step: Step) -> Result:
    """x [N, C, S...], weight, bias or None, stride, ...; a transposed one is not followed."""
    x = step.type_at(0)
    weight = step.type_at(1)
    is_transposed = step.arg(6, "transposed")
    groups = step.arg(8, "groups", 1)
    if is_transposed or Types([x, weight]).has("U"):
        return UNKNOWN
    product = _product(step, x, weight, groups=groups)
    bias = step.args[2]
    if bias is None or product.kind == "U":
        return product
    bias_type = step.type_of(bias)
    on_channels = replace(bias_type, dim=1) if bias_type.is_known_shard else bias_type
    return sum_of(step, Types([product, on_channels]))


def _product(step: Step, x: SpmdType, weight: SpmdType, *, groups: int) -> SpmdType:
    is_grouped = groups > 1
    is_within_groups = weight.is_known_shard and weight.dim != 0
    if is_grouped and is_within_groups:
        return UNKNOWN
    labels = _WITHIN_CHANNELS if is_grouped else _OVER_CHANNELS
    product = einsum_type(step, x, weight, labels)
    if product.kind != "V" or not x.is_known_shard:
        return product
    assert x.dim is not None
    if x.dim < 2:  # a shard of the batch, or of channels
        return product
    needs_neighbours = step.args[1].shape[x.dim] > 1
    pending = crosses(step, x) if needs_neighbours else None
    return replace(x, grad=product.grad, pending=pending)
