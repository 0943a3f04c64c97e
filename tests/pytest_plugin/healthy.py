"""Tests of a user that are right; run by tests/test_pytest_plugin.py as a session of their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpcompile.pytest_plugin.fixture import TensorParallel

FAST = {"backend": "eager"}


@pytest.fixture(scope="module")
def width() -> int:
    return 16


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PLACE", os.environ.get("RANK", "no rank"))
    return os.environ["PLACE"]


def test_before_without_ranks(width: int, place: str) -> None:
    assert (width, place) == (16, "no rank")


@pytest.mark.tp(world_size=2)
@pytest.mark.parametrize(("name", "scale"), [("a b", 1.0), ("[c::d]", 2.0)])
def test_parametrised(tp: TensorParallel, width: int, scale: float, name: str, place: str) -> None:
    tp.expect(graphs=1, breaks=0, recompiles=0)
    y = tp.check(lambda x: tp.comm.all_reduce(x * scale), torch.ones(width), **FAST)
    assert y.tolist() == [2 * scale] * width
    assert place == str(tp.rank) and name


@pytest.mark.tp(world_size=2)
def test_temporary_folder_and_captures(
    tp: TensorParallel, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    paths: list[str | None] = [None] * tp.world_size
    dist.all_gather_object(paths, str(tmp_path))
    assert len(set(paths)) == 2 and tmp_path.is_dir()
    print("out")
    assert capsys.readouterr().out == "out\n"
    logging.getLogger("mine").warning("logged")
    assert caplog.messages == ["logged"]


@pytest.fixture(params=[1, 2])
def summed(tp: TensorParallel, request: pytest.FixtureRequest) -> Iterator[int]:
    x = torch.full((1,), float(request.param))
    dist.all_reduce(x)
    yield int(x)
    dist.barrier()


class TestInAClass:
    @pytest.mark.tp(world_size=3)
    def test_fixture_with_collectives(self, summed: int) -> None:
        assert summed in (3, 6)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.tp(world_size=2)
def test_dtensor_model_with_its_backward(tp: TensorParallel) -> None:
    model = Pair()
    parallelize_module(model, tp.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    tp.check(model, torch.ones(2, 16), backward=True, backend="aot_eager")
    assert tp.verdict is not None and tp.verdict.exit_code == 0


@pytest.mark.tp(world_size=2)
def test_expected_breaks_and_recompiles(tp: TensorParallel) -> None:
    def block(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    tp.expect(graphs=2, breaks=1)
    tp.check(block, torch.ones(4), **FAST)
    tp.expect(recompiles=1)
    tp.check(lambda x, y: x * y, (torch.ones(4), torch.ones(4)), {"x": torch.ones(8), "y": torch.ones(8)}, **FAST)


@pytest.mark.tp(world_size=2)
def test_compiled_by_the_user(tp: TensorParallel) -> None:
    tp.check(torch.compile(lambda x: x.sin(), backend="eager"), torch.ones(4))
    with pytest.raises(TypeError, match="compiled already: backend"):
        tp.check(torch.compile(lambda x: x.sin()), torch.ones(4), backend="eager")


@pytest.mark.tp(world_size=1)
def test_one_rank(tp: TensorParallel) -> None:
    tp.check(lambda x: x.sin(), torch.ones(4), **FAST)


@pytest.mark.tp(world_size=2)
def test_weights_are_equal(tp: TensorParallel) -> None:
    x = torch.rand(4)
    y = x.clone()
    dist.broadcast(y, 0)
    assert torch.equal(x, y)


@pytest.mark.tp(world_size=2)
def test_skipped() -> None:
    pytest.skip("on all ranks")


@pytest.mark.tp(world_size=2)
def test_skipped_on_one_rank(tp: TensorParallel) -> None:
    if tp.rank == 1:
        pytest.skip("has nothing to do")


@pytest.mark.tp(world_size=2)
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail_on_one_rank(tp: TensorParallel) -> None:
    assert tp.rank == 0


@pytest.mark.tp(world_size=2)
@pytest.mark.xfail(reason="known to die", strict=True)
def test_expected_to_die(tp: TensorParallel) -> None:
    if tp.rank == 1:
        os._exit(3)


def test_after_without_ranks(width: int, place: str) -> None:
    assert (width, place) == (16, "no rank")
