"""Calls under `graphed`: which are captured, which replayed, what is refused; a recorder stands for CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.profiles.recorder import Recorder
from tpcompile.errors import ConfigError
from tpcompile.profiles.gradients import modules_of
from tpcompile.profiles.graphed import WARM_UPS, Graphed, release_all


def graphed(program: Callable[..., Any], **options: Any) -> tuple[Graphed, Recorder, list[str]]:
    """The callable, what it asked of the recorder, and the signatures that ranks would compare."""
    recorder, agreed = Recorder(), []
    defaults = {"ranks": Alone(agreed), "modules": modules_of(program)}
    call = Graphed(program, recorder, label="program", **(defaults | options))
    return call, recorder, agreed


class Alone:
    """One rank, which keeps what it would tell the others."""

    def __init__(self, agreed: list[str]) -> None:
        self.agreed = agreed

    def capture(self, signature: str) -> None:
        self.agreed.append(signature)

    def captured(self, problem: str) -> None:
        if problem:
            raise ConfigError(problem)


def double(x: Tensor, *_rest: Any, **_options: Any) -> Tensor:
    return x * 2


def test_the_first_call_of_a_signature_is_captured_and_later_ones_are_replayed() -> None:
    call, recorder, agreed = graphed(double)
    first = call(torch.ones(2))
    assert first.tolist() == [2, 2]
    second = call(torch.full((2,), 3.0))
    assert second is first, "the outputs are those of the graph"
    assert second.tolist() == [6, 6]
    assert (call.num_captures, call.num_replays, recorder.num_warm_ups) == (1, 2, WARM_UPS)
    assert agreed == ["(0: float32[2]), grad on"]


class Pair(NamedTuple):
    x: Tensor
    scale: float


DIFFERENT = {
    "shape": (torch.ones(3),),
    "dtype": (torch.ones(2, dtype=torch.float64),),
    "strides": (torch.ones(2, 2).t()[0],),
    "requires grad": (torch.ones(2, requires_grad=True),),
    "number": (torch.ones(2), 1),
    "bool for a number": (torch.ones(2), True),
    "structure": ([torch.ones(2)],),
}


@pytest.mark.parametrize("args", DIFFERENT.values(), ids=DIFFERENT)
def test_a_different_signature_is_captured_for_itself(args: tuple[Any, ...]) -> None:
    call, _, agreed = graphed(lambda x, *_: torch.zeros(2))
    for one in ((torch.ones(2),), (torch.ones(2), 2), args, args):
        call(*one)
    assert call.num_captures == len(set(agreed)) == 3


def test_modes_of_the_thread_and_of_the_module_are_part_of_the_signature() -> None:
    module = nn.Dropout(0.5)
    call, _, agreed = graphed(module)
    x = torch.ones(64)
    call(x)
    with torch.no_grad():
        call(x)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()), torch.inference_mode():
        call(x)
    module.eval()
    assert call(x).tolist() == x.tolist(), "replayed as captured in training"
    assert len(set(agreed)) == call.num_captures == 4


def test_tensors_in_containers_are_copied_in_at_every_call() -> None:
    call, _, _ = graphed(lambda pairs, options: pairs[1].x * options["factor"] + pairs[0].x)
    for value in (1.0, 5.0):
        pairs = [Pair(torch.full((2,), value), 2.0), Pair(torch.full((2,), 10 * value), 2.0)]
        assert call(pairs, {"factor": torch.tensor(3.0)}).tolist() == [31 * value] * 2
    assert call.num_captures == 1


STRIDED = {"expanded": lambda x: x.expand(3, 2), "with gaps": lambda x: torch.stack([x, x], 1)[:, 0]}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_the_program_sees_the_strides_that_it_is_called_with(make: Callable[[Tensor], Tensor]) -> None:
    seen = []
    call, _, _ = graphed(lambda x: seen.append(x.stride()) or x + 1)
    for value in (1.0, 2.0):
        x = make(torch.full((2,), value))
        assert torch.equal(call(x), x + 1)
    assert set(seen) == {x.stride()}


def test_clones_of_outputs_are_left_alone_by_later_calls() -> None:
    call, _, _ = graphed(lambda x: {"y": [x + 1], "n": 3}, clone_outputs=True)
    first = call(torch.zeros(2))
    call(torch.ones(2))
    assert (first["y"][0].tolist(), first["n"]) == ([1, 1], 3)


def test_of_too_many_graphs_the_least_recently_used_goes_and_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    call, recorder, _ = graphed(double, max_graphs=2)
    for size in (1, 2, 1, 3):
        call(torch.ones(size))
    assert [graph.is_live for graph in recorder.graphs] == [True, False, True]
    assert (len(call._live), recorder.num_finished) == (2, 1)
    assert re.search("program: capture 3 .* 2 graphs", capfd.readouterr().err)
    call(torch.ones(2))
    assert call.num_captures == 4


def test_a_released_callable_captures_again() -> None:
    call, recorder, _ = graphed(double)
    call(torch.ones(2))
    release_all()  # as before a process group ends
    assert not recorder.graphs[0].is_live
    assert call(torch.full((2,), 4.0)).tolist() == [8, 8]
    assert call.num_captures == 2


def test_nothing_is_captured_where_the_ranks_do_not_agree() -> None:
    class Differ(Alone):
        def capture(self, signature: str) -> None:
            raise RuntimeError(signature)

    call, recorder, _ = graphed(double, ranks=Differ([]))
    with pytest.raises(RuntimeError, match=r"float32\[2\]"):
        call(torch.ones(2))
    assert (recorder.num_warm_ups, len(call._live)) == (0, 0)


# Training


class Step:
    """Forward and backward of a layer, with gradients that stay where they are."""

    def __init__(self, *, set_to_none: bool) -> None:
        self.layer = nn.Linear(2, 1, bias=False)
        self.set_to_none = set_to_none

    def expected(self, x: Tensor) -> list[list[float]]:
        return [x.sum(0).tolist()]


def step_of(own: Step) -> Callable[[Tensor], Tensor]:
    layer = own.layer

    def step(x: Tensor) -> Tensor:
        layer.zero_grad(set_to_none=own.set_to_none)
        loss = layer(x).sum()
        loss.backward()
        return loss.detach()

    return step


def test_a_whole_step_leaves_gradients_as_one_call_does() -> None:
    own = Step(set_to_none=False)
    call, _, _ = graphed(step_of(own))
    x = torch.ones(3, 2)
    call(x)
    grad = own.layer.weight.grad
    assert grad is not None
    assert grad.tolist() == own.expected(x)
    call(x * 5)
    assert own.layer.weight.grad is grad
    assert grad.tolist() == own.expected(x * 5)


def test_warm_up_calls_leave_no_trace_in_gradients_that_a_step_adds_to() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.full((1, 2), 7.0)
    captured = []

    class Watched(Recorder):
        def capture(self, call: Callable[[], Any]) -> Any:
            captured.append(layer.weight.grad.tolist())  # type: ignore[union-attr]
            return super().capture(call)

    def step(x: Tensor) -> None:
        layer(x).sum().backward()

    Graphed(step, Watched(), label="step", ranks=Alone([]), modules=modules_of(step))(torch.ones(3, 2))
    assert captured == [[[7.0, 7.0]]]


def test_a_step_that_replaces_gradients_is_refused() -> None:
    own = Step(set_to_none=True)
    call, recorder, _ = graphed(step_of(own))
    with pytest.raises(ConfigError, match=r"1 parameters \(weight, ...\).*set_to_none=False"):
        call(torch.ones(3, 2))
    assert (len(call._live), recorder.graphs[0].is_live) == (0, False)


def test_a_step_that_returns_its_gradients_may_drop_them() -> None:
    layer = nn.Linear(2, 1, bias=False)

    def step(x: Tensor) -> Tensor:
        layer.zero_grad(set_to_none=True)
        layer(x).sum().backward()
        grad = layer.weight.grad
        layer.zero_grad(set_to_none=True)
        return grad

    call, _, _ = graphed(step)
    assert [call(torch.full((1, 2), value)).tolist() for value in (1.0, 2.0)] == [[[1, 1]], [[2, 2]]]


# What is refused


def writes(x: Tensor) -> None:
    x.add_(1)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "device": (double, (torch.ones(2, device="meta"),), "argument 0 is on meta.*made on cpu"),
    "set": (double, ({1},), "argument 0 is a set.*pass tensors and numbers"),
    "object": (double, (torch.ones(2), [object()]), r"argument 1\[0\] is a object"),
    "forward of a train step": (nn.Linear(2, 2), (torch.ones(2),), "requires grad.*torch.no_grad"),
    "written": (writes, (torch.ones(2),), r"writes argument 0 in place.*static=\(0,\)"),
    "gradient": (lambda x: (x * 2).sum().backward(), (torch.ones(2, requires_grad=True),), "gradient in argument 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_follow_is_refused_in_one_line(name: str) -> None:
    program, args, says = REFUSED[name]
    call, recorder, _ = graphed(program)
    with pytest.raises(ConfigError, match=says) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    assert (len(call._live), recorder.graphs) == (0, [])


def test_static_arguments_are_written_where_they_are() -> None:
    call, _, agreed = graphed(writes, static=(0,))
    cache = torch.zeros(2)
    call(cache)
    before = cache.clone()
    call(cache)
    assert cache.tolist() == (before + 1).tolist()
    call(torch.zeros(2))
    assert call.num_captures == 2, "a graph for each address"
    assert len(set(agreed)) == 1, "which is no matter of the ranks"


def test_values_that_are_nan_are_no_change_in_place() -> None:
    call, _, _ = graphed(double)
    assert call(torch.tensor([float("nan"), 1.0])).isnan().tolist() == [True, False]


class NoCapture(Recorder):
    def capture(self, call: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors ...")


def test_what_cuda_does_not_capture_is_told_to_the_ranks_and_refused_in_one_line() -> None:
    call = Graphed(double, NoCapture(), label="program", ranks=Alone([]))
    with pytest.raises(ConfigError, match=r"^program .*: operation not[^\n]*$") as caught:
        call(torch.ones(2))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(call._live) == 0


def test_a_graph_of_this_rank_is_released_where_a_different_rank_has_none() -> None:
    class OfTwo(Alone):
        def captured(self, problem: str) -> None:
            raise ConfigError("out of memory (rank 1)")

    call, recorder, _ = graphed(double, ranks=OfTwo([]))
    with pytest.raises(ConfigError, match="rank 1"):
        call(torch.ones(2))
    assert [graph.is_live for graph in recorder.graphs] == [False]
