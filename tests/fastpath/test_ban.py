"""What is refused on a shard, in eager and in compiled graphs, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from tests.evidence.samples import divergences
from tests.fastpath import banned, kernels
from tpcompile.errors import ConfigError, FastPathError
from tpcompile.evidence.records import Layer, RankRecord, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.fastpath import ban, fast_path, registered, registry, tp_region
from tpcompile.fastpath.registry import tp_size
from tpcompile.fastpath.use import Use
from tpcompile.recording import CaptureSession

pytestmark = pytest.mark.usefixtures("fresh_compiler", "no_fast_paths")
NAME = "tests.fastpath.kernels.norm_kernel"


@pytest.fixture
def no_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


@pytest.fixture
def certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ban, "uncertified", lambda path, **_: "")


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankRecord]]:
    """Program -> what was captured of it: Triton kernels are traced, never run."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)

    def capture(
        program: Callable[[Tensor], Tensor],
        world_size: int = 2,
        rank: int = 0,
        first: Callable[[], None] = lambda: None,
    ) -> RankRecord:
        torch.compiler.reset()
        kernel_side_table.reset_table()  # as in a process of its own; torch 2.11 keeps it
        first()
        x = torch.ones(4)
        with CaptureSession() as session, session.phase("C/first"):
            torch.compile(program, backend=banned.traced_only)(x)
        return session.record(rank=rank, world_size=world_size, tp_aware=["traced_only"])

    yield capture


def use(name: str) -> Use:
    return Use(value_item(name, "in the dynamo graph"))


def block(x: Tensor) -> Tensor:
    return kernels.launch(x.sin())


Capture = Callable[..., RankRecord]


def test_a_kernel_that_is_not_registered_is_refused_at_the_users_line(traced_only: Capture) -> None:
    (found,) = traced_only(block).refused_ops
    assert found.about == NAME
    assert found.line is not None and "norm_kernel[" in found.line.code
    assert traced_only(block, world_size=1).refused_ops == ()


def test_a_single_gpu_fast_path_is_refused_where_it_is_declared_and_free_without_shards(traced_only: Capture) -> None:
    fast_path("norm", replaces=kernels.plain)(kernels.launch)
    record = traced_only(block)
    (found,) = record.refused_ops
    assert re.search(r" norm .*tp=none, at .*kernels\.py", found.notes["why"])
    assert dict(record.fast_paths)["norm"] == f"refused: {found.notes['why']}"
    assert dict(traced_only(block, world_size=1).fast_paths)["norm"] == "used"


@pytest.mark.usefixtures("certified")
@pytest.mark.parametrize("tp", ["per_head", "distributed_stats", "pointwise"])
def test_a_tp_aware_fast_path_is_used(traced_only: Capture, tp: str) -> None:
    fast_path("norm", replaces=kernels.plain, tp=tp)(kernels.launch)
    record = traced_only(block)
    assert (record.refused_ops, dict(record.fast_paths)["norm"]) == ((), "used")
    assert dict(record.environment)["source of norm"] == registered()["norm"].source.sha256


def test_a_tp_aware_fast_path_without_a_certificate_is_refused(traced_only: Capture) -> None:
    fast_path("norm", replaces=kernels.plain, tp="per_head")(kernels.launch)
    (found,) = traced_only(block).refused_ops
    assert "`tpcompile certify norm --import MODULE`" in found.notes["why"]


def test_a_fast_path_that_no_graph_calls_says_so(traced_only: Capture) -> None:
    fast_path("norm", replaces=kernels.plain)(kernels.launch)
    record = traced_only(lambda x: x.sin())
    assert dict(record.fast_paths)["norm"].partition(":")[0] == "not applicable"


def test_ranks_with_different_kernels_differ_by_the_name_of_the_kernel(traced_only: Capture) -> None:
    one, other = (traced_only(block, rank=rank) for rank in (0, 1))
    edited = dict(other.environment) | {f"source of {NAME}": "0123456789abcdef"}
    other = other.model_copy(update={"environment": tuple(sorted(edited.items()))})
    (found,) = divergences(one, other)
    assert found.layer == Layer.ENVIRONMENT and f"source of {NAME}" in found.title


def test_ranks_with_different_grids_differ_at_the_users_line(traced_only: Capture) -> None:
    records = []
    for rank, num_blocks in enumerate((24, 28)):
        folded = torch._dynamo.assume_constant_result(lambda num_blocks=num_blocks: num_blocks)  # torch asks no guard
        records.append(traced_only(lambda x, folded=folded: kernels.launch_in_grid(x, (folded(),)), rank=rank))
    (found,) = divergences(*records)
    assert (found.layer, found.cause) == (Layer.GRAPH, Cause.RANK_CONSTANT)
    assert "24" in found.title and "28" in found.title
    assert all(group.item and group.item.line and "norm_kernel[grid]" in group.item.line.code for group in found.groups)


def test_equal_launches_are_equal_whatever_was_traced_before(traced_only: Capture) -> None:
    def earlier() -> None:
        kernel_side_table.add_kernel(kernels.scale)
        kernel_side_table.add_constant_args({"SIZE": 1})

    assert divergences(traced_only(block), traced_only(block, rank=1, first=earlier)) == ()


def test_ranks_with_different_constants_of_a_kernel_differ(traced_only: Capture) -> None:
    def launched(size: int, rank: int) -> RankRecord:
        folded = torch._dynamo.assume_constant_result(lambda: size)
        return traced_only(lambda x: kernels.launch_in_grid(x, (1,), folded()), rank=rank)

    (found,) = divergences(launched(4, 0), launched(8, 1))
    assert (found.layer, found.cause) == (Layer.GRAPH, Cause.RANK_CONSTANT)
    assert "SIZE=4" in found.title and "SIZE=8" in found.title


@torch.library.custom_op("tpcompile_tests::hides", mutates_args=())
def hides(x: Tensor) -> Tensor:
    return x.clone()


@hides.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OnlyInTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return hides(grad)  # only here


def test_an_op_that_is_only_in_the_backward_is_refused_at_its_line() -> None:
    x = torch.ones(4, requires_grad=True)
    with CaptureSession() as session, session.phase("C/first"):
        torch.compile(lambda x: OnlyInTheBackward.apply(x).sum(), backend="aot_eager")(x).backward()
    (found,) = session.record(rank=0, world_size=2).refused_ops
    assert found.about == "tpcompile_tests::hides"
    assert found.line is not None and "hides(grad)" in found.line.code


@pytest.mark.usefixtures("certified")
def test_an_op_is_the_fast_path_that_it_was_registered_as() -> None:
    fast_path("hidden", replaces=torch.clone, tp="pointwise")(hides)
    assert registered()["hidden"].names == {"tpcompile_tests::hides"}
    assert ban.refusal(use("tpcompile_tests::hides"), ()) == ""


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("_C::fused_add_rms_norm", "vllm"),
        ("_C::rotary_embedding", "vllm"),
        ("flash_attn::layer_norm_fwd_impl", "flash-attn"),
        ("flash_attn.ops.triton.rotary.rotary_kernel", "flash-attn"),
        ("liger_kernel.ops.rms_norm._rms_norm_forward_kernel", "liger-kernel"),
        ("flashinfer::fused_add_rmsnorm", "flashinfer"),
        ("apex::group_norm_nhwc_fprop", "apex"),
    ],
)
def test_single_gpu_packages_are_refused_by_name_with_the_reason(name: str, package: str) -> None:
    assert ban.refusal(use(name), ()).startswith(f"{package} (")
    assert ban.refusal(use(name), {name}) == ""  # the user vouches for it


def test_a_name_that_is_declared_allows_no_other() -> None:
    item = value_item("mylib.other", "in the dynamo graph")
    assert ban.judge([item], tp_size=2, declared=["mylib.norm"]).refused
    judged = ban.judge([item], tp_size=2, declared=["other"])
    assert not judged.refused
    assert [status.partition(":")[0] for name, status in judged.statuses if "other" in name] == ["declared"]


def test_in_eager_a_single_gpu_fast_path_is_refused_in_a_region_of_shards_only() -> None:
    guarded = fast_path("double", replaces=kernels.plain)(kernels.plain)
    x = torch.ones(2)
    assert torch.equal(guarded(x), x * 128)
    with tp_region(1):
        guarded(x)
    with (
        tp_region(2),
        pytest.raises(FastPathError, match=r"\bdouble\b.* \(tp=none\) .* 2 ranks"),
    ):
        guarded(x)
    guarded(x)


def test_a_region_holds_in_the_threads_of_autograd_too() -> None:
    def in_a_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(tp_size).result()

    with tp_region(4):
        assert (tp_size(), in_a_thread()) == (4, 4)
        with tp_region(1):  # the single-device reference
            assert tp_size() == 1
    assert (tp_size(), in_a_thread()) == (1, 1)


def test_in_compiled_code_the_region_breaks_no_graph() -> None:
    guarded = fast_path("double", replaces=kernels.plain)(kernels.plain)
    with tp_region(2):
        assert torch.equal(
            torch.compile(lambda x: guarded(x), backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 128.0)
        )


def test_a_name_is_taken_once_and_a_declaration_is_checked() -> None:
    fast_path("double", replaces=kernels.plain)(kernels.plain)
    fast_path("double", replaces=kernels.plain)(kernels.plain)  # its module imported again
    with pytest.raises(ConfigError, match=r"double: at .*kernels\.py"):
        fast_path("double", replaces=kernels.plain)(kernels.launch)
    with pytest.raises(ConfigError, match=r"other: tp='heads'"):
        fast_path("other", replaces=kernels.plain, tp="heads")


def test_a_rank_that_does_not_call_the_kernel_is_reported_in_the_program_not_in_its_environment(
    traced_only: Capture,
) -> None:
    def captured(rank: int) -> RankRecord:
        is_first = torch._dynamo.assume_constant_result(lambda: rank == 0)
        return traced_only(lambda x: kernels.launch(x) if is_first() else kernels.plain(x), rank=rank)

    (found,) = (found for found in divergences(captured(0), captured(1)) if found.is_red)
    assert (found.layer, found.cause) == (Layer.GRAPH, Cause.RANK_BRANCH)
