"""Which tensors their reference cannot judge, and whether that leaves the comparison undecided; torch-free."""

from __future__ import annotations

from collections.abc import Mapping

_OUTPUT, _OF_PARAMETER = "forward", " of "
"""`forward`, `forward.1`, `forward NAME` are outputs; `forward exp_avg of NAME` is what a step made of a parameter."""


def undecided(is_judged: Mapping[str, bool]) -> list[str]:
    """Of tensors by name those that decide nothing, where that leaves the comparison undecided; else empty.

    It does where an output decides nothing, or most of all tensors. A few gradients are often nothing but rounding:
    that of a bias in front of a softmax is zero.
    """
    names = [name for name, judged in is_judged.items() if not judged]
    is_open = any(name.startswith(_OUTPUT) and _OF_PARAMETER not in name for name in names)
    return names if is_open or 2 * len(names) > len(is_judged) else []
