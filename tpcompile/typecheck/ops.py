"""Names of ops by what they do to a value, as more than one analysis needs them."""

SAME_VALUE = {
    "aten.alias", "aten.detach", "aten.clone", "aten._to_copy", "aten.contiguous", "aten.lift_fresh", "aten.view_as",
    "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
}  # fmt: skip
VIEWS = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unsqueeze", "aten.squeeze",
    "aten.expand", "aten.transpose", "aten.t", "aten.permute", "aten.movedim", "aten.select", "aten.unbind",
    "aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.flatten", "aten.unflatten",
}  # fmt: skip


def order_of(reduction: str) -> float | None:
    """The order of a norm by the name of the reduction, as of `norm` (2), `norm1` or `norminf`; None for others."""
    if not reduction.startswith("norm"):
        return None
    return float(reduction.removeprefix("norm") or 2)
