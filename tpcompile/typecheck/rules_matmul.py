"""Matrix products and attention, as sums over labelled dims: two sharded halves of a summed dim make a partial sum."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck.gradients import whole_kind, wrong_gradient
from tpcompile.typecheck.layout import broadcast
from tpcompile.typecheck.rules_pointwise import partial_times, sum_of, used_as_whole
from tpcompile.typecheck.rules_reduce import over_last
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, SpmdType
from tpcompile.typecheck.step import Result, Step, rule, tensors_in

_LABELS = {
    "aten.mm": ("nk", "km", "nm"),
    "aten.bmm": ("bnk", "bkm", "bnm"),
    "aten.mv": ("nk", "k", "n"),
    "aten.dot": ("k", "k", ""),
}


def contract(step: Step, left: SpmdType, right: SpmdType, labels: tuple[str, str, str]) -> SpmdType:
    """Type of an einsum of two operands; `labels` are of the left, the right and the result."""
    types = (left, right)
    if any(t.kind == "U" for t in types):
        return UNKNOWN
    if partial := [t for t in types if t.kind == "P"]:
        if len(partial) == 2:
            return used_as_whole(step, left, "multiplies two partial values")
        return partial_times(step, partial[0], [t for t in types if t.kind != "P"])
    if (wrong := wrong_gradient(step, types)) is not None:
        return wrong
    grad = left.grad or right.grad
    if not any(t.kind == "V" for t in types):
        return SpmdType(whole_kind(types), grad)
    return replace(_shard_of_product(step, types, labels), grad=grad)


def _shard_of_product(step: Step, types: tuple[SpmdType, SpmdType], labels: tuple[str, str, str]) -> SpmdType:
    names = [label[t.dim] if t.dim is not None else "" for t, label in zip(types, labels, strict=False)]
    unknown = [t.kind == "V" and t.dim is None for t in types]
    sharded = {name for name in names if name}
    if len(sharded) != 1:
        return SpmdType("V")
    (name,) = sharded
    shard = types[names.index(name)]
    if name not in labels[2]:
        # One summed dim, sharded on both sides; a V of unknown dim has the matching part, or the sizes would differ.
        both = names[0] == names[1] or any(unknown)
        return SpmdType("P", origin=step.origin()) if both else SpmdType("V")
    if any(unknown):
        return SpmdType("V")
    return replace(shard, dim=labels[2].index(name))


@rule(*_LABELS)
def _product(step: Step) -> Result:
    """A matrix product."""
    return contract(step, step.type_at(0), step.type_at(1), _LABELS[step.name])


@rule("aten.addmm", "aten.baddbmm", "aten.addmv")
def _product_plus(step: Step) -> Result:
    """Bias plus a matrix product: a bias on a partial product is counted once per rank."""
    labels = _LABELS[{"aten.addmm": "aten.mm", "aten.baddbmm": "aten.bmm", "aten.addmv": "aten.mv"}[step.name]]
    product = contract(step, step.type_at(1), step.type_at(2), labels)
    bias = step.args[0]
    if product.kind == "U" or step.kwargs.get("beta", 1) == 0:
        return product
    return sum_of(step, [product, broadcast(step, bias, step.type_at(0))])


@rule(
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable", "aten.scaled_dot_product_attention",
)  # fmt: skip
def _attention(step: Step) -> Result:
    """Softmax over the keys between two products: [b, h, s, e], [b, h, t, e], [b, h, t, f]."""
    scores = contract(step, step.type_at(0), step.type_at(1), ("bhse", "bhte", "bhst"))
    weights = over_last(step, scores, {3}, "sums exponentials over the keys")
    result = contract(step, weights, step.type_at(2), ("bhst", "bhtf", "bhsf"))
    return [result, *[UNKNOWN] * (len(tensors_in(step.out)) - 1)]


@rule("aten.embedding")
def _embedding(step: Step) -> Result:
    """Rows of a table: whole from a replicated one, of unknown use from one sharded over the vocabulary."""
    weight, index = step.type_at(0), step.type_at(1)
    if weight.kind == "P":
        return UNKNOWN
    if (wrong := wrong_gradient(step, [weight, index])) is not None:
        return wrong
    rows: Tensor = step.args[1]
    if weight.kind == "V":
        on_width = weight.dim == 1 and index.is_whole
        return weight.with_dim(rows.dim(), weight.left, weight.right) if on_width else weight.with_dim(None)
    if index.kind != "V":
        return replace(weight if weight.kind != "C" else CONSTANT, origin=None)
    return replace(index, grad=weight.grad)
