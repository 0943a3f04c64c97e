"""Faults that a reviewer planted around fast paths, knowing the page of fast paths, and right code written otherwise.

What the type check does not see is listed in docs/fastpath.md with what does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.test_fast_paths import checked
from tpcompile.fastpath import plain


def root_before_the_reduce(all_reduce: Any, sums: Tensor) -> Tensor:
    return all_reduce(sums.sqrt()).square()  # the fault


def only_issued(all_reduce: Any, sums: Tensor) -> Tensor:
    all_reduce(sums)  # the fault
    return sums


def activation_before_the_reduce(all_reduce: Any, x: Tensor, part: Tensor) -> Tensor:
    return x + all_reduce(F.silu(part))  # the fault


def scaled_by_its_own_mean(all_reduce: Any, x: Tensor, part: Tensor) -> Tensor:
    return x + all_reduce(part * part.mean())  # the fault


def normalised_before_the_reduce(all_reduce: Any, x: Tensor, part: Tensor) -> Tensor:
    scale = torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6)  # the fault
    return x + all_reduce(part * scale)


def stream_left_partial(all_reduce: Any, x: Tensor, part: Tensor) -> Tensor:
    all_reduce(part).sum()
    return x + part  # the fault


def residual_reduced_too(all_reduce: Any, x: Tensor, part: Tensor) -> Tensor:
    return all_reduce(x) + all_reduce(part)  # the fault


def mean_of_the_shard(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up / (gate.square().mean(-1, keepdim=True) + 1)  # the fault


def softmax_of_the_shard(gate: Tensor, up: Tensor) -> Tensor:
    return gate.softmax(-1) * up  # the fault


def each_sum_by_itself(all_reduce: Any, sums: Tensor) -> Tensor:
    return torch.cat([all_reduce(part.contiguous()) for part in sums.split(1, -1)], -1)


def scaled_before_and_after(all_reduce: Any, sums: Tensor) -> Tensor:
    return all_reduce(sums * 0.5) * 2


def in_two_halves(all_reduce: Any, x: Tensor, part: Tensor) -> Tensor:
    return x + torch.cat([all_reduce(half.contiguous()) for half in part.chunk(2, -1)], -1)


def as_it_is(all_reduce: Any, x: Tensor, part: Tensor) -> Tensor:
    return x + all_reduce(part)


def statistics(block: Any, sums: Callable[..., Tensor]) -> None:
    def fast_path(*args: Any, all_reduce: Any, **options: Any) -> Any:
        return plain.qk_norm_rope(*args, all_reduce=lambda local: sums(all_reduce, local), **options)

    block.attention.fast_path = fast_path


def output(block: Any, total: Callable[..., Tensor]) -> None:
    def fast_path(x: Tensor, part: Tensor, weight: Tensor, *, eps: float, exchange: Any) -> tuple[Tensor, Tensor]:
        sum_D = total(exchange.all_reduce, x, part)
        return sum_D, plain.normalized(sum_D, plain.sum_of_squares(sum_D) / sum_D.shape[-1], eps) * weight

    block.fast_path = fast_path


def activation(block: Any, code: Callable[..., Tensor]) -> None:
    block.mlp.fast_path = code


RED = [
    (statistics, root_before_the_reduce, "partial-used-as-whole"),
    (statistics, only_issued, "result-dropped"),
    (output, activation_before_the_reduce, "partial-used-as-whole"),
    (output, scaled_by_its_own_mean, "partial-used-as-whole"),
    (output, normalised_before_the_reduce, "partial-used-as-whole"),
    (output, stream_left_partial, "bias-before-reduce"),
    (output, residual_reduced_too, "double-reduce"),
    (activation, mean_of_the_shard, "local-statistic"),
    (activation, softmax_of_the_shard, "local-statistic"),
]
RIGHT = [
    (statistics, each_sum_by_itself),
    (statistics, scaled_before_and_after),
    (output, in_two_halves),
    (output, as_it_is),
    (activation, plain.silu_mul),
]


@pytest.mark.parametrize(("place", "fault", "code"), RED)
def test_a_planted_fault_is_found_at_its_line(place: Any, fault: Any, code: str) -> None:
    finding = checked("llama", "full", lambda block: place(block, fault), exchanging=place is output).finding
    assert finding is not None and str(finding).startswith(code), finding
    assert "# the fault" in str(finding) and fault.__name__ in str(finding), finding


@pytest.mark.parametrize(("place", "code"), RIGHT)
def test_right_code_that_is_written_otherwise_raises_no_alarm(place: Any, code: Any) -> None:
    report = checked("llama", "full", lambda block: place(block, code), exchanging=place is output)
    assert report.finding is None and "passed" in str(report), str(report)
