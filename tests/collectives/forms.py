"""Every collective in every form: what it takes and gives in the contract's types, and the ops it may issue.

Types, per tensor: V, another tensor on every rank; I, equal on all ranks with equal gradients; R, equal on all ranks
with partial gradients (their sum is the gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tpcompile.collectives import api as tp
from tpcompile.collectives import asynchronous as later

ROWS, COLUMNS = 4, 4


@dataclass(frozen=True)
class Form:
    """`call(x, group)` on one rank."""

    call: Callable[[Tensor, Any], Tensor]
    takes: str
    gives: str
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    uneven_dim: int | None = None
    """The dim of x that has `sizes(world)[rank]` elements."""
    total_dim: int | None = None
    """The dim of x that has sum(sizes) elements."""

    @property
    def even(self) -> bool:
        """All ranks hold equal shapes, so their graphs must be equal."""
        return self.uneven_dim is None and self.total_dim is None


def sizes(world: int) -> list[int]:
    """Uneven shards, one of them empty for four ranks."""
    return [1, 3, 0, 2][:world]


def splits(world: int) -> list[list[int]]:
    """Entry [a][b]: rows that rank a sends to rank b."""
    return [[(a + 2 * b) % 3 for b in range(world)] for a in range(world)]


def x_shape(form: Form, rank: int, world: int) -> tuple[int, int]:
    """Shape of this rank's input."""
    shape = [ROWS, COLUMNS]
    if form.uneven_dim is not None:
        shape[form.uneven_dim] = sum(splits(world)[rank]) if "all_to_all" in form.forward[0] else sizes(world)[rank]
    if form.total_dim is not None:
        shape[form.total_dim] = sum(sizes(world))
    return shape[0], shape[1]


def _reductions() -> dict[str, Form]:
    ar, forms = ("all_reduce",), {}
    for op in ("sum", "avg", "max", "min"):
        one = ar if op in ("max", "min") else ()
        forms[f"all_reduce {op} I"] = Form(lambda x, g, op=op: tp.all_reduce(x, group=g, op=op), "V", "I", ar, one)
        forms[f"all_reduce {op} R"] = Form(
            lambda x, g, op=op: tp.all_reduce(x, group=g, op=op, dst="R"), "V", "R", ar, (*one, *ar)
        )
    for op in ("sum", "avg"):
        for dst, back in (("I", ()), ("R", ar)):
            forms[f"all_reduce_start {op} {dst}"] = Form(
                lambda x, g, op=op, dst=dst: later.all_reduce_start(x, group=g, op=op, dst=dst).wait(),
                "V",
                dst,
                ar,
                back,
            )
    forms["copy_to_tp"] = Form(lambda x, g: tp.copy_to_tp(x, group=g), "I", "R", (), ar)
    for dst, back in (("I", ()), ("R", ar)):
        forms[f"broadcast {dst}"] = Form(
            lambda x, g, dst=dst: tp.broadcast(x, src=1, group=g, dst=dst), "V", dst, ("broadcast",), back
        )
    return forms


def _moves(dim: int) -> dict[str, Form]:
    ag, rs, a2a = ("all_gather_into_tensor",), ("reduce_scatter_tensor",), ("all_to_all_single",)
    forms = {}
    for dst, back in (("I", ()), ("R", rs)):
        forms[f"all_gather {dst}"] = Form(
            lambda x, g, dst=dst: tp.all_gather_single(x, dim=dim, group=g, dst=dst), "V", dst, ag, back
        )
        forms[f"all_gather uneven {dst}"] = Form(
            lambda x, g, dst=dst: tp.all_gather_single(x, dim=dim, group=g, dst=dst, sizes=sizes(g.size())),
            *("V", dst, ag, back, dim),
        )
        forms[f"all_gather_start {dst}"] = Form(
            lambda x, g, dst=dst: later.all_gather_start(x, dim=dim, group=g, dst=dst).wait(), "V", dst, ag, back
        )
        forms[f"scatter {dst}"] = Form(
            lambda x, g, dst=dst: tp.scatter_single(x, dim=dim, group=g, src=dst),
            *(dst, "V", (), ag if dst == "I" else ()),
        )
    forms["reduce_scatter"] = Form(lambda x, g: tp.reduce_scatter_single(x, dim=dim, group=g), "V", "V", rs, ag)
    forms["reduce_scatter uneven"] = Form(
        lambda x, g: tp.reduce_scatter_single(x, dim=dim, group=g, sizes=sizes(g.size())),
        *("V", "V", rs, ag, None, dim),
    )
    forms["reduce_scatter_start"] = Form(
        lambda x, g: later.reduce_scatter_start(x, dim=dim, group=g).wait(), "V", "V", rs, ag
    )
    forms["all_to_all"] = Form(lambda x, g: tp.all_to_all_single(x, dim=dim, group=g), "V", "V", a2a, a2a)
    forms["all_to_all uneven"] = Form(lambda x, g: _uneven_exchange(x, dim, g), "V", "V", a2a, a2a, dim)
    forms["all_to_all_start"] = Form(
        lambda x, g: later.all_to_all_start(x, dim=dim, group=g).wait(), "V", "V", a2a, a2a
    )
    return {f"{name} dim {dim}": form for name, form in forms.items()}


def _uneven_exchange(x: Tensor, dim: int, group: Any) -> Tensor:
    matrix, rank = splits(group.size()), group.rank()
    return tp.all_to_all_single(
        x, dim=dim, group=group, input_splits=matrix[rank], output_splits=[row[rank] for row in matrix]
    )


FORMS: dict[str, Form] = {**_reductions(), **_moves(0), **_moves(1)}
