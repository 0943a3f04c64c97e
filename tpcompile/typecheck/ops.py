"""Names of ops, without overload and without the `_` of the in-place form, by what they do to a value."""

SAME_VALUE = {
    "aten.alias", "aten.detach", "aten.clone", "aten._to_copy", "aten.contiguous", "aten.lift_fresh", "aten.view_as",
    "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
}  # fmt: skip
WAITS = {"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}
"""Ops of `SAME_VALUE` that wait for a collective or pass its result on: neither is a use of it."""
VIEWS = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unsqueeze", "aten.squeeze",
    "aten.expand", "aten.transpose", "aten.t", "aten.permute", "aten.movedim", "aten.select", "aten.unbind",
    "aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.flatten", "aten.unflatten",
}  # fmt: skip
SUMS = {"aten.add", "aten.sub", "aten.rsub"}
SCALINGS = {"aten.mul", "aten.div", "aten.true_divide"}
PACKS = {"aten.cat", "aten.stack"}

LABELS = {
    "aten.mm": ("nk", "km", "nm"),
    "aten.bmm": ("bnk", "bkm", "bnm"),
    "aten.mv": ("nk", "k", "n"),
    "aten.dot": ("k", "k", ""),
}
"""Matrix product -> the dims of its operands and of its result; the one that is summed over is not in the result."""
PRODUCT_OF = {"aten.addmm": "aten.mm", "aten.baddbmm": "aten.bmm", "aten.addmv": "aten.mv"}
"""Bias plus a matrix product -> the product."""
PRODUCTS = {*LABELS, *PRODUCT_OF, "aten.convolution"}
"""Ops that make a partial sum of two shards."""

PARTIAL_OF = {
    "aten.sum": "sum",
    "aten.mean": "mean",
    "aten.amax": "max",
    "aten.max": "max",
    "aten.amin": "min",
    "aten.min": "min",
    "aten.prod": "product",
    "aten.linalg_vector_norm": "norm",
    "aten.norm": "norm",
    "aten.var": "var",
    "aten.std": "var",
    "aten.var_mean": "var",
    "aten.logsumexp": "logsumexp",
}
"""Reduction over a dim -> the partial value that it makes of a shard of this dim."""
CHOICES = {"aten.sort", "aten.topk", "aten.argmax", "aten.argmin", "aten.argsort"}
"""Ops that choose, or order, by value along a dim."""

FUNCTIONAL = {
    "_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor",
}  # fmt: skip
