"""Ops of torch by what they do to values, as a trace names them."""

from __future__ import annotations

TAKES_APART = {
    "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice", "aten.narrow", "aten.unbind", "aten.select",
    "aten.view", "aten._unsafe_view", "aten.reshape",
}  # fmt: skip
ALL_PIECES = {"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind"}
"""Those that return all of what they were given."""
SAME_VALUES = TAKES_APART | {
    "aten.t", "aten.transpose", "aten.permute", "aten.unsqueeze", "aten.squeeze", "aten.clone", "aten.detach",
    "aten.alias", "aten._to_copy", "aten.expand",
}  # fmt: skip
LINEAR = SAME_VALUES | {"aten.add", "aten.sub", "aten.sum", "aten.stack", "aten.cat", "aten._foreach_add"}
POWERS = {"aten.pow", "aten.linalg_vector_norm", "aten._foreach_norm", "aten._foreach_pow"}
"""Norms: what is summed over the ranks are their squares."""
SQUARES = POWERS | {"aten.dot", "aten.vdot", "aten.mul", "aten.square"}
"""What a norm begins with."""
PUTS_TOGETHER = {"aten.cat", "aten.stack"}
ADDS = {"aten.add", "aten.sub", "aten.sum", "aten.stack", "aten.cat", "aten._foreach_add"}
ACCUMULATES = {"aten.add", "aten.add_"}
"""How autograd adds up the gradients of a tensor that is used twice."""
PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.convolution"}
ADDS_TO_PRODUCT = {"aten.addmm", "aten.baddbmm", "aten.addmv", "aten.convolution"}
STATISTICS = {
    "aten.mean", "aten.var", "aten.var_mean", "aten.std", "aten.amax", "aten.amin", "aten.max", "aten.min",
    "aten.logsumexp", "aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.native_layer_norm",
    "aten._fused_rms_norm", "aten.native_group_norm", "aten.native_batch_norm", "aten.linalg_vector_norm",
    "aten._foreach_norm", "aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.mse_loss", "aten.smooth_l1_loss",
    "aten.huber_loss", "aten.binary_cross_entropy", "aten.binary_cross_entropy_with_logits",
}  # fmt: skip
"""Ops whose result depends on all of a dim, and that are not sums over it."""
CROSSES_PLACES = {
    "aten.constant_pad_nd", "aten.roll", "aten.flip", "aten.cumsum", "aten.cumprod", "aten.logcumsumexp",
    "aten.convolution", "aten.max_pool2d_with_indices", "aten.avg_pool2d", "aten.sort", "aten.topk", "aten.unfold",
    "aten.im2col",
}  # fmt: skip
"""Ops of which a place of the result depends on other places of what they were given."""
_MOVES = SAME_VALUES | CROSSES_PLACES | {
    "aten.cat", "aten.stack", "aten.repeat", "aten.embedding", "aten.gather", "aten.index", "aten.index_select",
    "aten.take_along_dim", "aten.scatter", "aten.index_copy", "aten.slice_scatter", "aten.copy_",
}  # fmt: skip
BY_NUMBERS = {"aten.mul", "aten.div", "aten.add", "aten.sub", "aten.rsub", "aten.pow", "aten.mul_", "aten.div_"}
"""Ops that may be given Python numbers, of which their result is made."""
NEGATES = {"aten.bitwise_not", "aten.logical_not"}
MASKS = {"aten.where", "aten.masked_fill", "aten.masked_fill_", "aten.index_put", "aten.index_put_"}
NO_VALUES = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
"""Their numbers mean nothing."""
IN_SOME_RUNS = NO_VALUES | {"aten.clone", "aten.detach", "aten.alias", "aten.copy_", "aten.lift_fresh"}
"""Whether autograd copies a gradient depends on Python's memory: in these, ranks and runs of one program differ."""
WRITTEN_UNSAID = {"aten.native_batch_norm": 3, "aten.cudnn_batch_norm": 3, "aten.miopen_batch_norm": 3}
"""Ops that write two of their arguments, the running statistics, which their schema does not say; place of the first.
Seen on torch 2.11.0 and 2.13.0."""
COLLECTIVES = ("_c10d_functional.", "c10d.")
SUMS_OVER_RANKS = (
    "_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor", "c10d.allreduce_",
    "c10d._reduce_scatter_base_", "c10d.reduce_scatter_",
)  # fmt: skip


def may_move(name: str) -> bool:
    """True for an op that may return what it was given at other places."""
    return name in _MOVES or name.startswith(COLLECTIVES)
