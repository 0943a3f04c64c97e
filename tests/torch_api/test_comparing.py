"""The names of torch that run a compiled graph beside its eager values are there, and mean what they are taken for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpcompile.torch_api import comparing
from tpcompile.torch_api.comparing import Compiled, Graph


class Seen:
    """Graphs that ran; the program goes on with zeros in place of their outputs."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def on_run(self, graph: Graph, inputs: Sequence[Any], compiled: Compiled) -> Sequence[Any]:
        self.graphs.append(graph)
        return [torch.zeros_like(out) if isinstance(out, Tensor) else out for out in compiled(*inputs)]


def program(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


def test_graphs_of_inductor_run_through_it_forward_and_backward() -> None:
    seen, x = Seen(), torch.ones(4, requires_grad=True)
    torch.compiler.reset()
    with comparing.inductor_graphs(seen.on_run):
        y = torch.compile(program)(x)
        y.sum().backward()
    assert [graph.is_backward for graph in seen.graphs] == [False, True]
    assert x.grad is not None
    assert (float(y.abs().sum()), float(x.grad.abs().sum())) == (0.0, 0.0)
    targets = [node.target for node in seen.graphs[0].module.graph.nodes]
    assert torch.ops.aten.sin.default in targets


def test_graphs_of_dynamo_have_the_backend_of_the_program() -> None:
    seen = Seen()

    def own(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        return graph.forward

    for backend in ("aot_eager", "inductor", own):
        torch.compiler.reset()
        with comparing.dynamo_graphs(seen.on_run):
            torch.compile(program, backend=backend)(torch.ones(4))
    assert [graph.backend for graph in seen.graphs] == ["aot_eager", "inductor", own]


def test_options_of_a_compile_are_kept() -> None:
    seen = Seen()
    torch.compiler.reset()
    with comparing.inductor_graphs(seen.on_run):
        torch.compile(program, options={"epilogue_fusion": False})(torch.ones(4))
    assert seen.graphs[0].settings["epilogue_fusion"] is False


def test_what_a_program_adds_can_be_put_in_again() -> None:
    def local(*_: Any) -> None: ...

    assert comparing.added("inductor", {"post_grad_custom_post_pass": program})[-1].line == (
        f"torch._inductor.config.post_grad_custom_post_pass = sys.modules[{__name__!r}].program"
    )
    assert [one.line for one in comparing.added("inductor", {"post_grad_custom_post_pass": local})][-1] == ""


def test_random_numbers_are_put_back(device: str = "cpu") -> None:
    torch.ones(1, device=device)
    put_back = comparing.put_back_random()
    drawn = torch.rand(4, device=device)
    other = torch.rand(4, device=device)
    put_back()
    assert torch.equal(torch.rand(4, device=device), drawn)
    assert not torch.equal(other, drawn)
