"""Matrix products and attention as sums over labelled dims: operands sharded on a summed dim make a partial sum."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck.gradients import mixed_shards, whole_kind, wrong_gradient
from tpcompile.typecheck.layout import broadcast
from tpcompile.typecheck.rules_pointwise import product_with_partial, sum_of
from tpcompile.typecheck.rules_reduce import over_last
from tpcompile.typecheck.rules_scale import weighted, weights_of
from tpcompile.typecheck.spmd import UNKNOWN, SpmdType, Types
from tpcompile.typecheck.step import Result, Step, rule

_LABELS = {
    "aten.mm": ("nk", "km", "nm"),
    "aten.bmm": ("bnk", "bkm", "bnm"),
    "aten.mv": ("nk", "k", "n"),
    "aten.dot": ("k", "k", ""),
}
_PRODUCT_OF = {"aten.addmm": "aten.mm", "aten.baddbmm": "aten.bmm", "aten.addmv": "aten.mv"}


PRODUCTS = (*_LABELS, *_PRODUCT_OF, "aten.convolution")
"""Ops that make a partial sum of two shards."""


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
    if not types.has("V"):
        return SpmdType(whole_kind(types), types.grad)
    return replace(_shard_of_product(step, types, labels), grad=types.grad)


def _shard_of_product(step: Step, types: Types, labels: tuple[str, str, str]) -> SpmdType:
    """Type of a product without partial operands, of which one or both are varying."""
    shards: dict[str, SpmdType] = {}
    for type_, dims in zip(types, labels, strict=False):
        if type_.dim is not None:
            shards.setdefault(dims[type_.dim], type_)
    if len(shards) > 1:
        return mixed_shards(step, types.of_kind("V"))
    if not shards:
        return SpmdType("V")
    [(label, shard)] = shards.items()
    varying = types.of_kind("V")
    result_dims = labels[2]
    if label not in result_dims:
        # The summed dim is sharded on both sides; a V of unknown dim has the matching part, or the sizes would differ.
        is_partial = len(varying) == 2
        return SpmdType("P", origin=step.origin()) if is_partial else SpmdType("V")
    if None in varying.dims:
        return SpmdType("V")
    return replace(shard, dim=result_dims.index(label))


@rule(*_LABELS)
def _product(step: Step) -> Result:
    """A matrix product."""
    return einsum_type(step, step.type_at(0), step.type_at(1), _LABELS[step.name])


@rule(*_PRODUCT_OF)
def _product_plus(step: Step) -> Result:
    """Bias plus a matrix product: a bias on a partial product is counted once per rank."""
    labels = _LABELS[_PRODUCT_OF[step.name]]
    product = einsum_type(step, step.type_at(1), step.type_at(2), labels)
    beta, _ = weights_of(step)
    if product.kind == "U" or beta == 0:
        return product
    bias = broadcast(step, step.args[0], weighted(step, step.type_at(0), beta))
    return sum_of(step, Types([product, bias]))


@rule(
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable", "aten.scaled_dot_product_attention",
)  # fmt: skip
def _attention(step: Step) -> Result:
    """Softmax over the keys between two products: [b, h, s, e], [b, h, t, e], [b, h, t, f]."""
    wrong = _wrong_places(step, step.type_at(0), step.type_at(1))
    if wrong is not None:
        return step.first_result(wrong)
    scores = einsum_type(step, step.type_at(0), step.type_at(1), ("bhse", "bhte", "bhst"))
    weights = over_last(step, scores, {3}, "sums exponentials over the keys")
    result = einsum_type(step, weights, step.type_at(2), ("bhst", "bhtf", "bhsf"))
    return step.first_result(result)


def _wrong_places(step: Step, queries: SpmdType, keys: SpmdType) -> SpmdType | None:
    """Report attention over this rank's keys alone, and a causal mask that takes the first local query for token 0."""
    if keys.is_known_shard and keys.dim == 2:
        attended = step.pending(
            "shift",
            "local-statistic",
            why=f"{step.name} attends to keys that are sharded over tokens: every query sees this rank's tokens only",
            fix="all_gather keys and values along the tokens; or merge the ranks' results by their log-sum-exp",
        )
        return SpmdType("V", queries.grad or keys.grad, queries.dim, pending=attended)
    is_causal = step.arg(_CAUSAL_PLACE.get(step.name, 5), "is_causal", default=False)
    if is_causal and queries.is_known_shard and queries.dim == 2:
        return step.flag(
            "local-positions",
            why="queries are sharded over tokens and keys are whole: is_causal takes the first query of every rank for "
            "token 0",
            fix="pass a mask made from global positions: key position <= query position + rank_index * local length",
        )
    return None


_CAUSAL_PLACE = {
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_flash_attention": 4,
    "aten._scaled_dot_product_efficient_attention": 6,
    "aten._scaled_dot_product_cudnn_attention": 6,
}


@rule("aten.embedding")
def _embedding(step: Step) -> Result:
    """Rows of a table: whole from a replicated one, sharded on no known dim from one sharded over the vocabulary."""
    weight = step.type_at(0)
    index = step.type_at(1)
    if weight.kind == "P":
        return UNKNOWN
    wrong = wrong_gradient(step, Types([weight, index]))
    if wrong is not None:
        return wrong
    if weight.kind == "V":
        indices: Tensor = step.args[1]
        is_width_shard = weight.dim == 1 and index.is_whole
        return replace(weight, dim=indices.dim()).keep_dim_if(is_width_shard)
    if index.kind == "V":
        return replace(index, grad=weight.grad)
    return replace(weight, is_zero=False, origin=None)
