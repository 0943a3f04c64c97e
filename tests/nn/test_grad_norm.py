"""Norm of all gradients under TP: that of one device, the same on all ranks, by one collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.nn.test_block import build, config_of
from tpcompile.block_args import BlockArgs
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.layout import Part, ShardSpec
from tpcompile.nn.causal_lm import CausalLM
from tpcompile.nn.grad_norm import clip_grad_norm_, grad_norm
from tpcompile.nn.linear import ColumnParallelLinear
from tpcompile.nn.state import full_state_dict, load_full_state_dict, local_slices_of
from tpcompile.numerics.counting import EagerCollectives
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights, draw_weights
from tpcompile.testing import run_on_ranks

F64 = torch.float64
FORMS = ("wan", "llama", "kv head replicated", "uneven", "uneven grouped", "sequence parallel llama", "everything")
Trained = Callable[[Collectives], nn.Module]
"""Collectives -> a module with gradients in it."""


def trained_stack(form: str) -> Trained:
    config = config_of(form, "full")
    full = draw_stack_weights(config, seed=0, dtype=F64, device="cpu")
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=F64, seq_len=config.seq_len)

    def train(comm: Collectives) -> nn.Module:
        stack = build(config, comm, full)
        stack(*inputs).sin().sum().backward()
        return stack

    return train


def trained_model(comm: Collectives) -> nn.Module:
    """A tied vocabulary that tp does not divide, and one kv head for all ranks."""
    args = BlockArgs(
        style="llama", dim=16, num_heads=4, num_kv_heads=1, ffn_dim=10, qk_norm="per_head", bias=True, causal=True,
        eps=1e-6, dtype="float64", uneven="pad",
    )  # fmt: skip
    model = CausalLM(args, comm, num_layers=2, vocab_size=11, tied=True)
    whole = CausalLM(args, Collectives(None), num_layers=2, vocab_size=11, tied=True)
    load_full_state_dict(model, draw_weights(whole, seed=0, dtype=F64, device="cpu"))
    ids = torch.arange(12).view(2, 6) % 11
    angles = torch.arange(6, dtype=F64).unsqueeze(1) * torch.tensor([1.0, 0.1], dtype=F64)
    model.loss(ids, ids.roll(-1, 1), angles.cos(), angles.sin()).backward()
    return model


def measured(train: Trained, comm: Collectives) -> dict[str, Any]:
    """Norms, collectives, and errors of the clipped gradients, against one device."""
    single, module = train(Collectives(None)), train(comm)
    expected = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1)
    heard = EagerCollectives(comm)
    with heard.listening():
        norm = clip_grad_norm_(module, 0.1)
    wanted = {name: parameter.grad for name, parameter in single.named_parameters()}
    own = local_slices_of(wanted, module=module)
    differences = []
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        difference = parameter.grad - own[name]
        differences.append(difference.abs().max().item())
    return {
        "norm": norm.item(),
        "error": abs(norm.item() / expected.item() - 1),
        "clipped": max(differences),
        "collectives": [(c.op, c.shape) for c in heard.collectives],
    }


class Plain(nn.Module):
    """A module of no library: its reduce is written out, its layouts nowhere."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__()
        self.tp = comm
        self.up = nn.Linear(8, 12 // comm.size, bias=False, dtype=F64)
        self.down = nn.Linear(12 // comm.size, 8, bias=False, dtype=F64)
        self.scale = nn.Parameter(torch.ones(8, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(self.tp.copy_to_tp(x)))
        return self.tp.all_reduce(self.down(h), dst="I") * self.scale


PLAIN_LAYOUTS = {"up.weight": 0, "down.*": ShardSpec(dim=1, parts=(12,))}


def plain_module(comm: Collectives) -> dict[str, Any]:
    """Layouts by pattern in the norm, and in the state dict."""
    torch.manual_seed(0)
    single, module = Plain(Collectives(None)), Plain(comm)
    full = {name: p.detach() for name, p in single.named_parameters()}
    load_full_state_dict(module, full, layouts=PLAIN_LAYOUTS, comm=comm)
    x = torch.linspace(-1, 2, 32, dtype=F64).view(4, 8)
    for each in (single, module):
        each(x).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in single.parameters() if p.grad is not None])
    again = full_state_dict(module, layouts=PLAIN_LAYOUTS, comm=comm)
    return {
        "error": abs(grad_norm(module, layouts=PLAIN_LAYOUTS, comm=comm).item() / expected.item() - 1),
        "state": all(torch.equal(again[name], tensor) for name, tensor in full.items()),
    }


def over_two_axes(form: str) -> dict[str, Any]:
    """TP and FSDP2: the gradients are DTensors over the other axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = config_of(form, "full")
    full = draw_stack_weights(config, seed=0, dtype=F64, device="cpu")
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=F64, seq_len=config.seq_len)
    single, stack = build(config, Collectives(None), full), build(config, Collectives(mesh["tp"]), full)
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(stack, mesh=mesh["dp"])
    for each in (single, stack):
        each(*inputs).sin().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1)
    norm = clip_grad_norm_(stack, 0.1)
    return {"error": abs(norm.item() / expected.item() - 1), "after": grad_norm(stack).item()}


def _worker() -> dict[str, Any]:
    comm = Collectives(dist.group.WORLD)
    found = {form: measured(trained_stack(form), comm) for form in FORMS}
    found["causal lm"] = measured(trained_model, comm)
    return found | {"plain": plain_module(comm), "two axes": over_two_axes("kv head replicated")}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, world_size=4, timeout_s=240)


@pytest.mark.parametrize("form", [*FORMS, "causal lm"])
def test_norm_and_clipped_gradients_are_those_of_one_device(ranks: list[dict[str, Any]], form: str) -> None:
    found = [rank[form] for rank in ranks]
    assert len({rank["norm"] for rank in found}) == 1, "bit for bit the same on all ranks"
    assert max(rank["error"] for rank in found) < 1e-12
    assert max(rank["clipped"] for rank in found) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_the_norm_takes_one_collective_of_one_number(ranks: list[dict[str, Any]], form: str) -> None:
    assert [rank[form]["collectives"] for rank in ranks] == [[("all_reduce", "[]")]] * 4


def test_a_plain_module_has_its_layouts_by_pattern(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["plain"]["error"] < 1e-12 and rank["plain"]["state"] for rank in ranks)


def test_gradients_that_fsdp_shards_again_are_summed_over_its_mesh(ranks: list[dict[str, Any]]) -> None:
    found = [rank["two axes"] for rank in ranks]
    assert all(rank["error"] < 1e-12 and rank["after"] == pytest.approx(0.1, rel=1e-4) for rank in found)


def test_padding_counts_nothing_whatever_is_in_it() -> None:
    class Place(Collectives):
        def __init__(self) -> None:
            super().__init__(None)
            self.rank, self.size = 1, 2

        def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
            return x

    module = ColumnParallelLinear(1, Part(3, padded=True), bias=False, comm=Place())
    module.weight.grad = torch.tensor([[3.0], [100.0]])
    assert grad_norm(module).item() == 3


def test_a_module_without_gradients_has_a_norm_of_zero() -> None:
    assert grad_norm(nn.Linear(2, 2), layouts={}).item() == 0


def test_shards_over_two_groups_are_refused() -> None:
    class Place(Collectives):
        def __init__(self, group: Any) -> None:
            super().__init__(None)
            self.group, self.rank, self.size = group, 0, 2

    modules = nn.ModuleList(ColumnParallelLinear(2, 2, bias=False, comm=Place(name)) for name in "ab")
    with pytest.raises(ConfigError, match="2 groups"):
        grad_norm(modules)
