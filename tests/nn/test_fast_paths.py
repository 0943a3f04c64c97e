"""A stack with fast paths computes what it computes without; which ones it has is decided once, before it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.graphs import GraphCapture
from tests.nn.test_block import CASES, _rows, build, config_of
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.measured import Decision, ShapeClass
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.fast_paths import check_exchanges, use_fast_paths, use_plain_code
from tpcompile.nn.linear import ColumnParallelLinear, RowParallelLinear
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.testing import run_on_ranks
from tpcompile.typecheck.check import fake_ranks

F64 = torch.float64


class Answers:
    """Stands for a Selection: notes what it is asked, and answers alike."""

    def __init__(self, is_used: bool, group: Any = None, num_programs: int | None = None) -> None:
        self.is_used = is_used
        self.group = group
        self.num_programs = num_programs
        self.asked: dict[str, tuple[Any, ...]] = {}

    def decide(self, name: str, shapes: Any, dtype: torch.dtype, *, variant: str = "") -> Decision:
        self.asked[name] = (*map(tuple, shapes), dtype, variant)
        shape = ShapeClass.of(shapes, dtype, tp=1, variant=variant)
        programs = self.num_programs
        return Decision(path=name, shape=shape, is_used=self.is_used, num_programs=programs, why="it was told to")


def stack_of(config: BlockConfig) -> TransformerStack:
    stack = TransformerStack(config, Collectives(None), num_layers=config.num_layers).double()
    load_full_state_dict(stack, draw_stack_weights(config, seed=0, dtype=F64, device=torch.device("cpu")))
    return stack


def results(stack: TransformerStack, config: BlockConfig) -> list[Tensor]:
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=F64, seq_len=config.seq_len)
    inputs.x_BSD.requires_grad_()
    output = stack(*inputs)
    output.square().sum().backward()
    return [output, inputs.x_BSD.grad, *(parameter.grad for parameter in stack.parameters())]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_plain_code_in_its_place_computes_the_same(case: tuple[str, str]) -> None:
    config = config_of(*case)
    stack, other = stack_of(config), stack_of(config)
    use_plain_code(other)
    for expected, found in zip(results(stack, config), results(other, config), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_each_place_is_asked_for_its_own_shapes_and_gets_the_fast_path() -> None:
    pytest.importorskip("triton")
    config = config_of("wan", "full")
    stack, answers = stack_of(config), Answers(is_used=True)
    decisions = use_fast_paths(stack, answers, batch=2, seq_len=6, train=True)  # type: ignore[arg-type]
    assert set(decisions) == set(answers.asked) == {"qkv_pack_rmsnorm_rope", "add_rms_norm", "gelu_tanh"}
    width, pairs = config.dim, config.head_dim // 2
    assert answers.asked["qkv_pack_rmsnorm_rope"] == ((2, 6, width), (2, 6, width), (6, pairs), F64, "train")
    assert answers.asked["add_rms_norm"] == ((2, 6, width), F64, "train")
    assert answers.asked["gelu_tanh"] == ((2, 6, config.ffn_dim), F64, "train")
    assert [layer.attention.takes_packed for layer in stack.layers] == [True] * len(stack.layers)
    answers = Answers(is_used=False)
    use_fast_paths(stack, answers, batch=2, seq_len=6, train=False)  # type: ignore[arg-type]
    assert all(layer.fast_path is None and layer.attention.fast_path is None for layer in stack.layers)
    assert {"qkv_pack_rmsnorm_rope", "qk_norm_rope"} <= set(answers.asked)  # one rank: that for one GPU, then the other


@pytest.mark.parametrize(
    ("form", "train", "expected"),
    [
        ("wan", False, "linear_gelu_tanh"),
        ("wan", True, "gelu_tanh"),  # it has no backward
        ("no bias", False, "gelu_tanh"),
        ("sequence parallel", False, "gelu_tanh"),
    ],
)
def test_the_up_projection_and_gelu_are_one_fast_path(form: str, train: bool, expected: str) -> None:
    pytest.importorskip("triton")
    config = config_of("wan" if form == "no bias" else form, "full")
    config = config.model_copy(update={"bias": form != "no bias"})
    stack, answers = stack_of(config), Answers(is_used=True)
    use_fast_paths(stack, answers, batch=2, seq_len=6, train=train)  # type: ignore[arg-type]
    mlp = stack.layers[0].mlp
    assert (mlp.fast_path.__name__, mlp.takes_product) == (expected, expected == "linear_gelu_tanh")
    if mlp.takes_product:
        assert answers.asked[expected] == ((2, 6, config.dim), (2, 6, config.ffn_dim), F64, "")
    assert {"gelu_tanh", "linear_gelu_tanh"} & set(answers.asked) == {expected}


def test_where_the_product_is_not_chosen_gelu_alone_is_asked_for() -> None:
    pytest.importorskip("triton")
    stack, answers = stack_of(config_of("wan", "full")), Answers(is_used=False)
    use_fast_paths(stack, answers, batch=2, seq_len=6, train=False)  # type: ignore[arg-type]
    assert {"gelu_tanh", "linear_gelu_tanh"} <= set(answers.asked)
    assert stack.layers[0].mlp.fast_path is None and not stack.layers[0].mlp.takes_product


@pytest.mark.parametrize("form", ["wan", "uneven", "dropout"])
def test_the_up_projection_with_gelu_computes_the_same(form: str) -> None:
    config = config_of(form, "full")
    stack, other = stack_of(config), stack_of(config)
    for layer in other.layers:
        layer.mlp.fast_path, layer.mlp.takes_product = plain.linear_gelu_tanh, True
    for expected, found in zip(results(stack, config), results(other, config), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    other.layers[0].mlp.fast_path = lambda *given: torch.nn.functional.gelu(torch.nn.functional.linear(*given))
    assert not torch.allclose(results(stack, config)[0], results(other, config)[0], rtol=1e-12, atol=1e-12)


def test_the_input_of_that_product_enters_the_tensor_parallel_region() -> None:
    up = stack_of(config_of("wan", "full")).layers[0].mlp.up
    up.comm = SimpleNamespace(copy_to_tp=lambda x: 3 * x)
    x = torch.randn(2, up.weight.shape[1], dtype=F64)
    expected = torch.nn.functional.linear(3 * x, up.weight, up.bias)
    assert torch.equal(up(x), expected)
    assert torch.equal(up.multiplied(x, torch.nn.functional.linear), expected)


def test_on_one_rank_attention_takes_the_kernel_for_one_gpu() -> None:
    pytest.importorskip("triton")
    config = config_of("wan", "full")
    stack, answers = stack_of(config), Answers(is_used=True)
    use_fast_paths(stack, answers, batch=2, seq_len=6, train=False)  # type: ignore[arg-type]
    attention = stack.layers[0].attention
    assert (attention.fast_path.__name__, attention.takes_packed) == ("qkv_pack_rmsnorm_rope", True)
    assert answers.asked["qkv_pack_rmsnorm_rope"] == (*((2, 6, config.dim),) * 2, (6, config.head_dim // 2), F64, "")
    answers = Answers(is_used=True, group=SimpleNamespace(size=lambda: 2))
    use_fast_paths(stack, answers, batch=2, seq_len=6, train=True)  # type: ignore[arg-type]
    assert (attention.fast_path.__name__, attention.takes_packed) == ("qk_norm_rope", False)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "full"], ids="-".join)
def test_q_k_and_v_in_one_tensor_give_the_same(case: tuple[str, str]) -> None:
    config = config_of(*case)
    stack, other = stack_of(config), stack_of(config)
    for layer in other.layers:
        if layer.attention.site(1, 1) is not None:
            layer.attention.fast_path, layer.attention.takes_packed = plain.qkv_pack, True
    for expected, found in zip(results(stack, config), results(other, config), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_exchanging", [False, True])
def test_an_exchange_of_ranks_other_than_those_of_the_module_is_refused(is_exchanging: bool) -> None:
    """Before it is made, and where it was put there by hand; one of the same ranks is not."""
    pytest.importorskip("triton")
    with fake_ranks(4):
        own, same, wrong = (dist.new_group(ranks) for ranks in ([0, 1], [0, 1], [0, 2]))
        stack = TransformerStack(config_of("llama", "full"), Collectives(own), num_layers=1)
        assert placed(stack, same, is_exchanging=is_exchanging) == ""
        message = "its exchange joins ranks 0,2, and the module sums over ranks 0-1; make the selection"
        assert message in placed(stack, wrong, is_exchanging=is_exchanging)


def placed(stack: TransformerStack, group: dist.ProcessGroup, *, is_exchanging: bool) -> str:
    """What is said of an exchange of that group; one that `use_fast_paths` makes, or one that is there already."""
    memory = torch.zeros(2 * 2 * 12 * 128, dtype=torch.int64)

    def exchange_of(group: Any, **sizes: Any) -> Any:
        return Exchange.between([memory.data_ptr()] * 2, rank=0, memory=memory, group=group, num_rows=12, row_words=128)

    from tpcompile.fastpath.kernels.exchange_memory import Exchange

    try:
        if is_exchanging:
            with (
                mock.patch("tpcompile.torch_api.symmetric.can_share", return_value=True),
                mock.patch.object(Exchange, "of_group", exchange_of),
            ):
                use_fast_paths(stack, Answers(True, group), batch=2, seq_len=6, train=False)  # type: ignore[arg-type]
        else:
            stack.layers[0].exchange = exchange_of(group)
            check_exchanges(stack)
    except FastPathError as error:
        return str(error)
    return ""


def test_an_exchange_has_the_grid_and_the_memory_that_were_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tpcompile.fastpath.kernels.exchange_memory import Exchange

    made: list[dict[str, Any]] = []
    monkeypatch.setattr("tpcompile.torch_api.symmetric.can_share", lambda device: True)
    monkeypatch.setattr(Exchange, "of_group", lambda group, **limits: made.append(limits) or object.__new__(Exchange))
    stack = stack_of(config_of("llama", "full", dtype="float32"))
    width = stack.layers[0].dim
    group = SimpleNamespace(size=lambda: 2)
    for programs in (114, None):
        answers = Answers(is_used=True, group=group, num_programs=programs)
        use_fast_paths(stack, answers, batch=2, seq_len=6, train=False)  # type: ignore[arg-type]
        grid = {} if programs is None else {"num_programs": programs}  # None: the exchange asks the ranks itself
        memory = {"num_rows": 16, "device": torch.device("cpu")}  # of the shape class of 12 tokens
        # One for each fast path: a word for every 4 bytes of a row of float64, and the sums of q and k.
        assert made == [{**memory, **grid, "row_words": words} for words in (2 * width, 2)]
        made.clear()


def exchange_in(folder: Path) -> Callable[..., Any]:
    """Stands for `Exchange.of_group`: the memory of each rank is a file that all of them map."""
    from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_words
    from tpcompile.torch_api import interpreted

    interpreted.like_gpus()
    interpreted.patient()

    def of_group(group: Any, *, num_rows: int, row_words: int, device: torch.device, num_programs: int) -> Exchange:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        words = num_words(size, num_rows=num_rows, row_words=row_words)
        files = [folder / f"{number}-{num_rows}-{row_words}" for number in range(size)]
        files[rank].write_bytes(bytes(8 * words))
        dist.barrier(group)
        memories = [torch.from_file(str(file), shared=True, size=words, dtype=torch.int64) for file in files]
        addresses = [memory.data_ptr() for memory in memories]
        options = {"num_rows": num_rows, "row_words": row_words, "num_programs": num_programs, "max_polls": 2**11}
        exchange = Exchange.between(addresses, rank=rank, memory=memories[rank], **options)
        object.__setattr__(exchange, "memory", memories)  # which keeps the mappings
        return exchange

    return of_group


EXCHANGED = {
    "llama": ["all_reduce_add_rms_norm", "qk_norm_rope_exchange", "silu_mul"],
    "wan": ["all_reduce_add_rms_norm", "linear_gelu_tanh", "qk_norm_rope_exchange"],  # with biases
}
"""Form of the block -> its fast paths. The first has one layer and is called at two lengths, the second has two."""


def exchanged(folder: str) -> dict[str, Any]:
    """On each rank: every form with kernels that sum over the ranks, and a rank that does not come."""
    from tpcompile.fastpath.kernels.exchange_memory import Exchange

    found = {}
    with (
        mock.patch("tpcompile.torch_api.symmetric.can_share", return_value=True),
        mock.patch.object(Exchange, "of_group", exchange_in(Path(folder))),
        torch.no_grad(),
    ):
        for form, num_layers, lengths in (("llama", 1, (6, 4)), ("wan", 2, (6,))):
            config = config_of(form, "full", dtype="float32", num_layers=num_layers)
            full = draw_stack_weights(config, seed=0, dtype=torch.float32, device=torch.device("cpu"))
            stack, plain_stack = (build(config, Collectives(dist.group.WORLD), full) for _ in range(2))
            answers = Answers(is_used=True, group=dist.group.WORLD, num_programs=2)
            sizes = {"batch": 2, "seq_len": config.seq_len}
            use_fast_paths(stack, answers, **sizes, train=False)  # type: ignore[arg-type]
            errors, capture = compared(stack, plain_stack, config, lengths)
            check_exchanges(stack)
            declared = _rows(stack, config, train=False)
            found[form] = sorted(answers.asked), errors, declared, capture.collectives[: len(declared)]
        inputs = draw_inputs(config, seed=1, device="cpu", dtype=torch.float32, seq_len=config.seq_len)
        found["late"] = without_rank_1(stack, *inputs[:3])
    return found | {"programs": programs_of_ranks()}


def programs_of_ranks() -> list[Any]:
    """What ranks with 132 and 114 multiprocessors make of no wish, of one, and of different ones."""
    from tpcompile.fastpath.kernels.exchange_memory import agreed_programs

    rank = dist.get_rank()
    agree = partial(agreed_programs, dist.group.WORLD, 132 - 18 * rank)
    with pytest.raises(FastPathError) as raised:
        agree(wanted=24 + 4 * rank)
    return [agree(wanted=None), agree(wanted=24), str(raised.value)]


def compared(
    stack: TransformerStack, plain_stack: TransformerStack, config: BlockConfig, lengths: Sequence[int]
) -> tuple[float, GraphCapture]:
    """The largest difference of the compiled stack, at these lengths."""
    torch._dynamo.reset()
    capture, worst = GraphCapture(), 0.0
    compiled = torch.compile(stack, backend=capture, fullgraph=True)
    for seq_len in lengths:
        inputs = draw_inputs(config, seed=seq_len, device="cpu", dtype=torch.float32, seq_len=seq_len)
        worst = max(worst, (compiled(*inputs) - plain_stack(*inputs)).abs().max().item())
    return worst, capture


def without_rank_1(stack: TransformerStack, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> str:
    if dist.get_rank() == 1:
        return ""
    stack.layers[0].attention(x_BSD, cos_SR, sin_SR, reduce=False)
    with pytest.raises(FastPathError) as raised:
        check_exchanges(stack)
    return str(raised.value)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return run_on_ranks(exchanged, str(tmp_path_factory.mktemp("words")), timeout_s=200)


@pytest.mark.parametrize("form", EXCHANGED)
def test_kernels_that_exchange_stand_for_collectives(form: str, ranks: list[dict[str, Any]]) -> None:
    """One graph, the same numbers at every length, and what the kernels sum is neither declared nor in the graph."""
    for found in ranks:
        asked, error, declared, traced = found[form]
        assert asked == EXCHANGED[form] and error < 1e-5
        assert traced == declared and len(declared) == 1, "the sum of the last MLP, which no block follows"


def test_ranks_that_make_an_exchange_agree_on_its_grid_or_are_named(ranks: list[dict[str, Any]]) -> None:
    named = "an exchange with different num_programs: 24 on rank 0 / 28 on rank 1; all ranks must pass the same"
    assert [found["programs"] for found in ranks] == [[114, 24, named]] * 2


def test_a_rank_that_does_not_come_to_an_exchange_is_named(ranks: list[dict[str, Any]]) -> None:
    assert re.search(r"rank 1 .* exchange \d", ranks[0]["late"])


def few_tokens(**changes: Any) -> BlockConfig:
    """Widths that a product of few rows takes; 8 tokens."""
    config = config_of("wan", "full", dtype="bfloat16", num_layers=1)
    sizes = {"dim": 768, "num_heads": 6, "num_kv_heads": 6, "ffn_dim": 768, "bias": True, "batch": 1, "seq_len": 8}
    return config.model_copy(update=sizes | changes)


@pytest.mark.parametrize(
    ("seq_len", "train", "expected"),
    [(8, False, "few_rows_linear"), (9, False, None), (8, True, None)],
    ids=["8 tokens", "9 tokens", "training"],
)
def test_products_of_few_tokens_are_places(seq_len: int, train: bool, expected: str | None) -> None:
    pytest.importorskip("triton")
    with torch.device("meta"):
        stack = TransformerStack(few_tokens(), Collectives(None), num_layers=1)
    answers = Answers(is_used=True)
    use_fast_paths(stack, answers, batch=1, seq_len=seq_len, train=train)  # type: ignore[arg-type]
    layer = stack.layers[0]
    linears = (layer.attention.wqkv, layer.attention.wo, layer.mlp.down)
    assert {getattr(linear.fast_path, "__name__", None) for linear in linears} == {expected}
    hidden = {True: "gelu_tanh", False: "few_rows_linear_gelu" if expected else "linear_gelu_tanh"}[train]
    assert (layer.mlp.fast_path.__name__, layer.mlp.takes_product) == (hidden, not train)
    if expected:
        assert answers.asked["few_rows_linear_gelu"] == ((1, 8, 768), (1, 8, 768), torch.bfloat16, "")


def test_a_linear_takes_the_fast_path_for_few_tokens_only() -> None:
    column = ColumnParallelLinear(768, 64, bias=True, comm=Collectives(None), dtype=torch.bfloat16)
    row = RowParallelLinear(768, 64, bias=True, comm=Collectives(None), dtype=torch.bfloat16)
    for linear in (column, row):
        torch.nn.init.normal_(linear.weight)
        torch.nn.init.normal_(linear.bias)
        linear.fast_path = mock.Mock(side_effect=plain.few_rows_linear)
        few, many = torch.randn(2, 4, 768).bfloat16(), torch.randn(3, 3, 768).bfloat16()
        expected = torch.nn.functional.linear(few, linear.weight) + linear.bias
        torch.testing.assert_close(linear(few), expected, rtol=2e-2, atol=2e-1)
        assert linear.fast_path.call_count == 1
        linear(many)  # as many rows as its kernel refuses
        assert linear.fast_path.call_count == 1
