"""Products as sums over labelled dims: operands sharded on a summed dim make a partial sum.

Matrix products, convolutions (channels are contracted like the features of a linear), attention, embedding tables.
"""

# N batch, C channels, S places (one or more dims); weight of a convolution [C out, C in / groups, kernel...]
from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck import wording
from tpcompile.typecheck.gradients import whole_kind, wrong_gradient
from tpcompile.typecheck.layout import broadcast, crossing
from tpcompile.typecheck.ops import LABELS, PRODUCT_OF
from tpcompile.typecheck.rules_pointwise import product_with_partial, sum_of
from tpcompile.typecheck.rules_reduce import normalised
from tpcompile.typecheck.rules_scale import weighted, weights_of
from tpcompile.typecheck.spmd import NOT_KNOWN, UNKNOWN, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, rule

_OVER_CHANNELS = ("niabc", "oixyz", "noabc")
"""x, weight, result; a, b, c are places and x, y, z those of the kernel."""
_WITHIN_CHANNELS = ("niabc", "iwxyz", "niabc")
_CAUSAL_PLACE = {
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_flash_attention": 4,
    "aten._scaled_dot_product_efficient_attention": 6,
    "aten._scaled_dot_product_cudnn_attention": 6,
}
"""Position of the argument `is_causal` in the schema of an attention; 5 in all others."""


def einsum_type(step: Step, left: SpmdType, right: SpmdType, labels: tuple[str, str, str]) -> SpmdType:
    """Type of an einsum of two operands; `labels` are of the left, the right and the result."""
    types = Types([left, right])
    if types.has("U"):
        return UNKNOWN
    if types.has("P"):
        return product_with_partial(step, types)
    wrong = wrong_gradient(step, types)
    if wrong is not None:
        return wrong
    varying = types.of_kind("V")
    if not varying:
        return SpmdType(whole_kind(types), types.grad)
    sharded = {dims[type_.dim] for type_, dims in zip(types, labels, strict=False) if type_.dim is not None}
    if len(sharded) > 1:
        return step.flag(wording.MIXED_SHARDS, dims=" and ".join(map(str, varying)))
    for label in sharded:
        is_summed = label not in labels[2]
        # A V of unknown dim has the matching part of what is summed, or the sizes would differ.
        if is_summed and len(varying) == 2:
            return SpmdType("P", types.grad, origin=step.origin())
        if not is_summed and None not in varying.dims:
            return replace(varying[0], grad=types.grad, dim=labels[2].index(label))
    return SpmdType("V", types.grad)


@rule(*LABELS)
def _product(step: Step) -> Result:
    """A matrix product."""
    return einsum_type(step, step.type_at(0), step.type_at(1), LABELS[step.name])


@rule(*PRODUCT_OF)
def _product_plus(step: Step) -> Result:
    """Bias plus a matrix product: a bias on a partial product is counted once per rank."""
    labels = LABELS[PRODUCT_OF[step.name]]
    product = einsum_type(step, step.type_at(1), step.type_at(2), labels)
    beta, _ = weights_of(step)
    if product.kind == "U" or beta == 0:
        return product
    bias = broadcast(step, step.args[0], weighted(step, step.type_at(0), beta))
    return sum_of(step, Types([product, bias]))


@rule("aten.convolution")
def _convolution(step: Step) -> Result:
    """x [N, C, S...], weight, bias or None, stride, ...; a transposed one is not followed."""
    x, weight, bias = step.type_at(0), step.type_at(1), step.args[2]
    is_transposed = step.arg(6, "transposed")
    is_grouped = step.arg(8, "groups", 1) > 1
    is_within_groups = is_grouped and weight.is_known_shard and weight.dim != 0
    if is_transposed or is_within_groups:
        return UNKNOWN
    product = einsum_type(step, x, weight, _WITHIN_CHANNELS if is_grouped else _OVER_CHANNELS)
    is_shard_of_places = product.kind == "V" and x.dim is not None and x.dim >= 2
    if is_shard_of_places:
        assert x.dim is not None
        product = replace(x, grad=product.grad)
        if step.args[1].shape[x.dim] > 1:
            product = crossing(step, product)
    if bias is None or product.kind == "U":
        return product
    bias_type = step.type_of(bias)
    on_channels = replace(bias_type, dim=1) if bias_type.is_known_shard else bias_type
    return sum_of(step, Types([product, on_channels]))


@rule(
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable", "aten.scaled_dot_product_attention",
)  # fmt: skip
def _attention(step: Step) -> Result:
    """Softmax over the keys between two products: [b, h, s, e], [b, h, t, e], [b, h, t, f]."""
    queries, keys, values = (step.type_at(place) for place in range(3))
    if keys.is_known_shard and keys.dim == 2:  # this rank's keys alone
        pending = step.pending("shift", wording.LOCAL_KEYS)
        return step.first_result(SpmdType("V", queries.grad or keys.grad, queries.dim, pending=pending))
    is_causal = step.arg(_CAUSAL_PLACE.get(step.name, 5), "is_causal", default=False)
    if is_causal and queries.is_known_shard and queries.dim == 2:
        return step.first_result(step.flag(wording.LOCAL_CAUSAL_MASK))
    scores = einsum_type(step, queries, keys, ("bhse", "bhte", "bhst"))
    weights = normalised(step, scores, {3}, "sums exponentials over the keys")
    return step.first_result(einsum_type(step, weights, values, ("bhst", "bhtf", "bhsf")))


@rule("aten.embedding")
def _embedding(step: Step) -> Result:
    """Rows of a table: whole from a replicated one, sharded on no known dim from one sharded over the vocabulary."""
    weight, index = step.type_at(0), step.type_at(1)
    if weight.kind == "P":
        return UNKNOWN
    wrong = wrong_gradient(step, Types([weight, index]))
    if wrong is not None:
        return wrong
    if weight.kind == "V":
        indices: Tensor = step.args[1]
        is_width_shard = weight.dim == 1 and index.is_whole
        # A row of zeros for what is not its own may have been put behind the rows of a rank.
        has_row_of_zeros = step.arg(2, "padding_idx", -1) >= 0 or not step.args[0].is_leaf
        is_lookup = weight.dim == 0 and not has_row_of_zeros
        found = replace(weight, dim=indices.dim(), is_lookup=is_lookup)
        return found.keep_dim_if(is_width_shard)
    if index.kind == "V":
        return replace(index, grad=weight.grad)
    return replace(weight, is_zero=False, origin=NOT_KNOWN)
