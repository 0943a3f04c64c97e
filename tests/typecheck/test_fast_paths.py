"""What is wrong where a block calls a fast path is found at its line; the right calls raise no alarm.

The type check follows the plain code of each fast path in its place: what the kernels do with it, certificates prove.
Of those that sum over the ranks within their kernel too: there a stand-in for the exchange does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn

from tests.nn.test_block import CASES, config_of
from tests.typecheck.test_clean import _inputs
from tpcompile.collectives.strategies import Collectives
from tpcompile.fastpath import plain
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.fast_paths import HasSite, PlainExchange, use_plain_code
from tpcompile.typecheck import Report, check_types
from tpcompile.typecheck.check import check_module, fake_ranks

TP = 4


def checked(
    form: str,
    qk_norm: str,
    spoil: Callable[[Any], None] = lambda block: None,
    *,
    exchanging: bool = False,
    num_layers: int = 1,
) -> Report:
    """Of a stack whose last layer is spoiled."""

    def build(comm: Collectives) -> nn.Module:
        stack = TransformerStack(config_of(form, qk_norm), comm, num_layers=num_layers)
        use_plain_code(stack, exchanging=exchanging)
        spoil(stack.layers[-1])
        return stack

    return check_types(build, _inputs(form, qk_norm, "cpu"), tp=TP)


@pytest.mark.parametrize("exchanging", [False, True])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_form_of_the_block_is_clean_with_fast_paths(case: tuple[str, str], exchanging: bool) -> None:
    report = checked(*case, exchanging=exchanging)
    assert report.finding is None and report.num_ops > 0, str(report)


def test_the_form_with_both_exchanges_is_among_them() -> None:
    stack = TransformerStack(config_of("llama", "full"), Collectives(None), num_layers=1)
    use_plain_code(stack, exchanging=True)
    placed = [module.exchange is not None for module in stack.modules() if hasattr(module, "exchange")]
    assert placed == [True] * 3, "the block, its entry and its attention"


@pytest.mark.parametrize("form", ["llama", "wan"])
def test_what_a_block_leaves_for_the_next_one_to_sum_is_clean(form: str) -> None:
    report = checked(form, "full", exchanging=True, num_layers=2)
    assert report.finding is None and report.num_ops > 0, str(report)


ENTRIES = {
    "reduced twice": ("double-reduce", lambda entry: twice(entry.exchange.all_reduce)),
    "not reduced": ("bias-before-reduce", lambda entry: only_own(entry.exchange.all_reduce)),
    "maximum": ("wrong-reduce-op", lambda entry: biggest(entry.exchange.all_reduce)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrong_sum_between_two_blocks_is_found(name: str) -> None:
    rule, spoiled = ENTRIES[name]

    def spoil(layer: Any) -> None:
        layer.entry.exchange = PlainExchange(spoiled(layer.entry))

    report = checked("wan", "full", spoil, exchanging=True, num_layers=2)
    assert report.finding is not None and report.finding.rule == rule, str(report)


def test_most_forms_have_a_place_for_a_fast_path() -> None:
    stack = TransformerStack(config_of("wan", "full"), Collectives(None), num_layers=1)
    sites = [module.site(2, 6) for module in stack.modules() if isinstance(module, HasSite)]
    found = {site.path for site in sites if site is not None}  # its linears have more tokens than few rows
    assert found == {"qk_norm_rope", "add_rms_norm", "gelu_tanh"}


def statistics_of_the_shard(*args: Any, all_reduce: Any, **options: Any) -> Any:
    return plain.qk_norm_rope(*args, all_reduce=plain.alone, **options)


def counts_of_the_shard(*args: Any, all_reduce: Any, counts: Any, **options: Any) -> Any:
    return plain.qk_norm_rope(*args, all_reduce=plain.alone, counts=[n // TP for n in counts], **options)


def reduced_twice(*args: Any, all_reduce: Any, **options: Any) -> Any:
    return plain.qk_norm_rope(*args, all_reduce=lambda x: all_reduce(all_reduce(x)), **options)  # here


def result_dropped(*args: Any, all_reduce: Any, **options: Any) -> Any:
    def reduce(sums_BS2: Tensor) -> Tensor:
        all_reduce(sums_BS2)  # here
        return sums_BS2

    return plain.qk_norm_rope(*args, all_reduce=reduce, **options)


def maximum_instead_of_sum(*args: Any, all_reduce: Any, **options: Any) -> Any:
    def reduce(sums_BS2: Tensor) -> Tensor:
        group = all_reduce.func.__self__.group
        return functional_collectives.all_reduce(sums_BS2, "max", group)  # here

    return plain.qk_norm_rope(*args, all_reduce=reduce, **options)


def wrong_gradient(*args: Any, all_reduce: Any, **options: Any) -> Any:
    return plain.qk_norm_rope(*args, all_reduce=lambda x: all_reduce.func(x, dst="I"), **options)  # here


def sums_scaled_before_the_reduce(*args: Any, all_reduce: Any, **options: Any) -> Any:
    return plain.qk_norm_rope(*args, all_reduce=lambda x: all_reduce(torch.rsqrt(x)), **options)  # here


def branch_reduced_again(block: Any) -> None:
    def fast_path(x_D: Tensor, branch_D: Tensor, weight_D: Tensor, *, eps: float) -> Any:
        return plain.add_rms_norm(x_D, comm.all_reduce(branch_D), weight_D, eps=eps)  # here

    comm = block.attention.wo.comm
    block.fast_path = fast_path


def residual_on_every_rank(block: Any) -> None:
    def fast_path(x_D: Tensor, branch_D: Tensor, weight_D: Tensor, *, eps: float) -> Any:
        sum_D = comm.all_reduce(x_D + branch_D)  # here
        return sum_D, plain.add_rms_norm(sum_D, torch.zeros_like(sum_D), weight_D, eps=eps)[1]

    comm = block.attention.wo.comm
    block.fast_path = fast_path


def used_before_its_reduce(block: Any) -> None:
    linear = block.attention.wo
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)


def weight_entered_twice(block: Any) -> None:
    norm = block.attention.qk_norm
    entered = norm._entered_weights
    norm._entered_weights = lambda: tuple(map(norm.comm.copy_to_tp, entered()))  # here


def weight_not_entered(block: Any) -> None:
    norm = block.attention.qk_norm
    norm._entered_weights = lambda: (norm.q_norm.weight, norm.k_norm.weight)


def in_attention(fast_path: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda block: setattr(block.attention, "fast_path", fast_path)


@dataclass(frozen=True)
class Red:
    """How a fault is found."""

    spoil: Callable[[Any], None]
    rule: str
    source: str = "# here"
    form: str = "wan"
    qk_norm: str = "full"


USED = "torch.rsqrt(mean_square_1 + eps)"
RED = {
    "statistics of the shard": Red(in_attention(statistics_of_the_shard), "partial-used-as-whole", USED),
    "counts of the shard": Red(in_attention(counts_of_the_shard), "partial-used-as-whole", USED),
    "reduced twice": Red(in_attention(reduced_twice), "double-reduce"),
    "result dropped": Red(in_attention(result_dropped), "result-dropped"),
    "maximum instead of sum": Red(in_attention(maximum_instead_of_sum), "wrong-reduce-op"),
    "used before its reduce": Red(in_attention(sums_scaled_before_the_reduce), "partial-used-as-whole"),
    "wrong gradient": Red(in_attention(wrong_gradient), "needs-dst-R", "torch.rsqrt(mean_square_1 + eps)"),
    "branch reduced again": Red(branch_reduced_again, "double-reduce"),
    "residual on every rank": Red(residual_on_every_rank, "double-reduce"),
    "branch before its reduce": Red(used_before_its_reduce, "bias-before-reduce", "sum_D = x_D + branch_D"),
    "weight entered twice": Red(weight_entered_twice, "double-copy", qk_norm="per_head"),
    "weight not entered": Red(weight_not_entered, "missing-copy", "* q_weight_E", qk_norm="per_head"),
}


@pytest.mark.parametrize("name", RED)
def test_a_wrong_call_is_found_at_its_line(name: str) -> None:
    red = RED[name]
    report = checked(red.form, red.qk_norm, red.spoil)
    assert report.finding is not None, str(report)
    found = (report.finding.rule, red.source in report.finding.site.source)
    assert found == (red.rule, True), str(report)


def in_exchange(all_reduce: Callable[[Any], Any], *, block: bool = False) -> Callable[[Any], None]:
    """`all_reduce` is given the right one, of the exchange of attention or of the block."""

    def spoil(layer: Any) -> None:
        module = layer if block else layer.attention
        module.exchange = PlainExchange(all_reduce(module.exchange.all_reduce))

    return spoil


def only_own(all_reduce: Any) -> Any:
    return lambda partial: partial


def twice(all_reduce: Any) -> Any:
    return lambda partial: all_reduce(all_reduce(partial))  # here


def dropped(all_reduce: Any) -> Any:
    def reduce(partial: Tensor) -> Tensor:
        all_reduce(partial)  # here
        return partial

    return reduce


def biggest(all_reduce: Any) -> Any:
    def reduce(partial: Tensor) -> Tensor:
        return functional_collectives.all_reduce(partial, "max", all_reduce.func.__self__.group)  # here

    return reduce


def average(all_reduce: Any) -> Any:
    def reduce(partial: Tensor) -> Tensor:
        return functional_collectives.all_reduce(partial, "avg", all_reduce.func.__self__.group)  # here

    return reduce


def residual_before_the_exchange(block: Any) -> None:
    def fast_path(x_D: Tensor, partial_D: Tensor, weight_D: Tensor, *, eps: float, exchange: Any) -> Any:
        both_D = partial_D + x_D  # here
        return plain.all_reduce_add_rms_norm(x_D, both_D, weight_D, eps=eps, all_reduce=exchange.all_reduce)

    block.fast_path = fast_path


def reduced_before_the_exchange(block: Any) -> None:
    wo = block.attention.wo
    wo.partial = lambda x: wo.comm.all_reduce(nn.functional.linear(x, wo.weight))


ADDED = "sum_D = x_D + branch_D"
EXCHANGED = {
    "statistics: of the shard": Red(in_exchange(only_own), "partial-used-as-whole", USED),
    "statistics: reduced twice": Red(in_exchange(twice), "double-reduce"),
    "statistics: result dropped": Red(in_exchange(dropped), "result-dropped"),
    "statistics: maximum": Red(in_exchange(biggest), "wrong-reduce-op"),
    "output: of the shard": Red(in_exchange(only_own, block=True), "bias-before-reduce", ADDED, form="llama"),
    "output: reduced twice": Red(in_exchange(twice, block=True), "double-reduce", form="llama"),
    "output: result dropped": Red(in_exchange(dropped, block=True), "result-dropped", form="llama"),
    "output: maximum": Red(in_exchange(biggest, block=True), "wrong-reduce-op", form="llama"),
    "output: average": Red(in_exchange(average, block=True), "wrong-reduce-op", form="llama"),
    "output: residual before": Red(residual_before_the_exchange, "bias-before-reduce", form="llama"),
    "output: reduced before": Red(reduced_before_the_exchange, "double-reduce", "all_reduce(partial_D)", form="llama"),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_a_wrong_exchange_is_found_at_its_line(name: str) -> None:
    red = EXCHANGED[name]
    report = checked(red.form, red.qk_norm, red.spoil, exchanging=True)
    assert report.finding is not None, str(report)
    found = (report.finding.rule, red.source in report.finding.site.source)
    assert found == (red.rule, True), str(report)


@pytest.mark.parametrize("exchanging", [False, True])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_statistics_that_are_summed_over_the_wrong_group_are_found(exchanging: bool, is_wrong: bool) -> None:
    """Of 8 ranks, over those that hold the same heads instead of those that hold the others."""
    inputs = _inputs("wan", "full", "cpu")
    with fake_ranks(2 * TP) as world:
        own, across = (dist.new_group(ranks) for ranks in (list(range(TP)), [0, TP]))
        stack = TransformerStack(config_of("wan", "full"), Collectives(own), num_layers=1)
        assert world.size() == 2 * TP
        if is_wrong:
            stack.layers[0].attention.qk_norm.comm = Collectives(across)
        use_plain_code(stack, exchanging=exchanging)
        report = check_module(stack, inputs, group=own)
    if not is_wrong:
        assert report.finding is None, str(report)
        return
    assert report.finding is not None, str(report)
    assert (report.finding.rule, report.finding.site.source) == (
        "partial-used-as-whole",
        f"return (x_D.to(mean_square_1.dtype) * {USED}).to(x_D.dtype)",
    ), str(report)
    assert report.finding.operands[0] == "P"
