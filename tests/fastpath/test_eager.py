"""Custom ops and Triton kernels are refused in eager where tensors are shards, before they run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpus import printed_by
from tpcompile.errors import FastPathError
from tpcompile.fastpath import ban_in_eager, fast_path, registry

triton = pytest.importorskip("triton")

CALLS = []


@triton.jit
def shard_kernel(pointer):
    pass


def launch(x: Tensor, kernel: Any = shard_kernel) -> None:
    kernel[(1,)](x)  # the user's line


@torch.library.custom_op("tpcompile_tests::in_eager", mutates_args=())
def in_eager(x: Tensor) -> Tensor:
    CALLS.append(x)
    return x * 2


@in_eager.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def nothing_called(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    CALLS.clear()
    yield


def own_launch(x: Tensor) -> None:
    shard_kernel[(1,)](x)


@torch.library.custom_op("tpcompile_tests::launching", mutates_args=())
def launching(x: Tensor) -> Tensor:
    shard_kernel[(1,)](x)
    return x.clone()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels that are launched; none runs here."""
    found: list[Any] = []
    monkeypatch.setattr(type(shard_kernel), "run", lambda kernel, *args, **kwargs: found.append(kernel))
    return found


def block(x: Tensor) -> Tensor:
    return in_eager(x.sin()).cos()  # the user's line


def test_an_op_that_is_not_registered_is_refused_before_it_runs_with_both_lines() -> None:
    message = (
        r"tpcompile_tests::in_eager was called at .*test_eager\.py:\d+ in block .* shards of 2 ranks, and it is not "
        r"registered as a fast path; it is defined at .*test_eager\.py:\d+ in in_eager"
    )
    with ban_in_eager(2), pytest.raises(FastPathError, match=message):
        block(torch.ones(2))
    assert not CALLS


def test_one_for_a_single_gpu_is_refused_by_its_declaration() -> None:
    fast_path("doubled", replaces=torch.sin)(lambda x: in_eager(x))
    with ban_in_eager(2), pytest.raises(FastPathError, match=r"doubled .* tp=none"):
        block(torch.ones(2))


@pytest.mark.parametrize(("size", "tp_aware"), [(1, ()), (2, ("tpcompile_tests::in_eager",))])
def test_it_runs_on_one_rank_and_where_the_user_vouches_for_it(size: int, tp_aware: tuple[str, ...]) -> None:
    x = torch.ones(2)
    with ban_in_eager(size, tp_aware=tp_aware):
        assert torch.equal(block(x), (x.sin() * 2).cos())
    assert len(CALLS) == 1


def test_outside_of_the_block_nothing_is_refused() -> None:
    with ban_in_eager(2):
        torch.ones(2).sin()
    block(torch.ones(2))


def test_compiled_code_stays_compiled() -> None:
    graphs = []
    compiled = torch.compile(lambda x: x.sin().cos(), backend=lambda graph, _: graphs.append(graph) or graph)
    with ban_in_eager(2):
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    assert len(graphs) == 1


@pytest.mark.parametrize("is_autotuned", [False, True])
def test_a_kernel_that_is_launched_without_an_op_is_refused_with_both_lines(
    is_autotuned: bool, launched: list[Any]
) -> None:
    kernel = triton.heuristics({})(shard_kernel) if is_autotuned else shard_kernel
    message = (
        r"test_eager\.shard_kernel was launched at .*test_eager\.py:\d+ in launch .* shards of 2 ranks, and it is not "
        r"registered as a fast path; it is defined at .*test_eager\.py:\d+ in shard_kernel"
    )
    with ban_in_eager(2), pytest.raises(FastPathError, match=message):
        launch(torch.ones(2), kernel)
    assert not launched
    launch(torch.ones(2), kernel)
    assert launched == [shard_kernel]


def test_a_kernel_runs_as_a_part_of_an_op_and_where_the_user_vouches_for_it(launched: list[Any]) -> None:
    with ban_in_eager(2, tp_aware=["tpcompile_tests::launching"]):
        launching(torch.ones(2))
        with pytest.raises(FastPathError, match=r"shard_kernel .*launched at .*test_eager\.py"):
            launch(torch.ones(2))
    with ban_in_eager(2, tp_aware=["shard_kernel"]), ban_in_eager(1):
        launch(torch.ones(2))
    assert launched == [shard_kernel, shard_kernel]


def test_a_kernel_of_a_fast_path_is_refused_outside_of_it(launched: list[Any]) -> None:
    fast_path("pointwise", replaces=torch.sin, tp="pointwise")(own_launch)
    with ban_in_eager(2), pytest.raises(FastPathError, match=r"outside .*\(pointwise\)"):
        shard_kernel[(1,)](torch.ones(2))
    with ban_in_eager(2), pytest.raises(FastPathError, match=r"in test_a_kernel_of.* pointwise at .*certify pointwise"):
        own_launch(torch.ones(2))
    assert not launched


ON_A_GPU = """
import sys
import torch, triton, triton.language as tl
from tests.gpus import printed_by
from tpcompile.errors import FastPathError
from tpcompile.fastpath import ban_in_eager

@triton.jit
def double(pointer):
    tl.store(pointer, 2 * tl.load(pointer))

double_tuned = triton.autotune([triton.Config({})], key=[])(double)
one = torch.ones(1, device="cuda")
with ban_in_eager(2):
    torch.compile(torch.sin)(one)  # Inductor's kernel
    for kernel in (double, double_tuned):
        try:
            kernel[(1,)](one)
        except FastPathError as error:
            print(error)
double[(1,)](one)
print(one.item())
"""


@pytest.mark.gpu(1)
def test_on_a_gpu_a_kernel_is_refused_before_its_launch_and_inductors_run(tmp_path: Path) -> None:
    *refused, value = printed_by(ON_A_GPU, tmp_path)
    assert value == "2.0"  # launched once, outside
    assert len([line for line in refused if "double" in line and "program.py" in line]) == 2, refused


def test_the_kernel_that_ends_waits_for_a_refused_call_may_run() -> None:
    """It is no fast path; without its name in the list it is refused like any other kernel."""
    from tpcompile.fastpath import eager
    from tpcompile.fastpath.kernels.closing import close_kernel

    ban = eager._Ban(2, frozenset({eager._CLOSES}))
    ban.check_launch(close_kernel)
    with pytest.raises(FastPathError, match=r"closing\.close_kernel .*launched at .*test_eager\.py"):
        eager._Ban(2, frozenset()).check_launch(close_kernel)
