"""Parameters without a declared layout: nothing is said that is only wrong if they are replicated."""

# B batch, S sequence, D model width, F hidden width, V vocabulary; f = F / tp and v = V / tp, the part of this rank
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.typecheck.programs import TP, WIDTH
from tpcompile.collectives.strategies import Collectives
from tpcompile.typecheck import Report, check_types

HIDDEN, VOCABULARY = 32, 64
X, IDS = torch.ones(2, 8, WIDTH), torch.zeros(2, 8, dtype=torch.long)
Again = Callable[[Tensor], Tensor]


class Undeclared(nn.Module):
    """Linear layers that hold this rank's part, or all, without a word about it; `again` follows the reduce."""

    def __init__(self, comm: Collectives, forward: Callable[..., Tensor], *, reduces_again: bool) -> None:
        super().__init__()
        self.comm, self.program, self.reduces_again = comm, forward, reduces_again
        self.norm, self.square = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN // TP), nn.Linear(HIDDEN // TP, WIDTH, bias=False)
        self.table = nn.Embedding(VOCABULARY // TP, WIDTH)
        self.router = nn.Linear(WIDTH, TP, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.program(self, x)
        return self.comm.all_reduce(y) if self.reduces_again else y


def column_and_row(m: Any, x: Tensor) -> Tensor:
    return x + m.comm.all_reduce(m.down(F.gelu(m.up(m.norm(x)))))


def reduced_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.down(F.gelu(m.up(x)))
    dist.all_reduce(y, group=m.comm.group)
    return x + y


def own_rows_of_a_table(m: Any, ids: Tensor) -> Tensor:
    start = m.comm.rank * len(m.table.weight)
    is_elsewhere = (ids < start) | (ids >= start + len(m.table.weight))
    rows = m.table((ids - start).masked_fill(is_elsewhere, 0))
    return m.comm.all_reduce(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


def own_part_of_a_whole_weight(m: Any, x: Tensor) -> Tensor:
    own_x, own_weight = (t.chunk(TP, -1)[m.comm.rank] for t in (x, m.square.weight))
    return m.comm.all_reduce(F.linear(own_x, own_weight))


def own_expert(m: Any, x: Tensor) -> Tensor:
    share = m.router(x).softmax(-1)[..., m.comm.rank, None]
    return m.comm.all_reduce(share * m.square(x))


def gathered_columns(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(m.up(x), dim=-1)[..., :WIDTH]


CORRECT = (
    column_and_row,
    reduced_in_place,
    own_rows_of_a_table,
    own_part_of_a_whole_weight,
    own_expert,
    gathered_columns,
)


def report(forward: Callable[..., Tensor], *, reduces_again: bool = False) -> Report:
    inputs, type_ = ((IDS,), "C") if forward is own_rows_of_a_table else ((X,), "I")
    build = lambda comm: Undeclared(comm, forward, reduces_again=reduces_again)  # noqa: E731
    return check_types(build, inputs, tp=TP, train=False, input_types=(type_,))


@pytest.mark.parametrize("forward", CORRECT, ids=lambda forward: forward.__name__)
def test_a_sum_of_what_an_undeclared_parameter_made_is_not_judged(forward: Callable[..., Tensor]) -> None:
    found = report(forward)
    assert found.finding is None and not found.is_complete, str(found)
    assert re.search(r"no layout .*parameter \w", found.not_followed_since)


@pytest.mark.parametrize("forward", [column_and_row, own_rows_of_a_table], ids=lambda forward: forward.__name__)
def test_a_sum_of_what_was_summed_before_is_found_without_declarations(forward: Callable[..., Tensor]) -> None:
    found = report(forward, reduces_again=True).finding
    assert found is not None and found.rule == "double-reduce"


def test_a_sum_of_an_input_is_found_without_declarations() -> None:
    found = report(lambda m, x: m.comm.all_reduce(m.norm(m.comm.all_reduce(x)))).finding
    assert found is not None and found.rule == "double-reduce"


def test_the_parameter_that_is_named_is_the_one_beside_the_sum() -> None:
    assert report(column_and_row).not_followed_since.endswith("parameter down.weight")
