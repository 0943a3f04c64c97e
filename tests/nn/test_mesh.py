"""TP inside a 2-D mesh: data parallel or FSDP2 on the other axis, four gloo ranks against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.graphs import GraphCapture
from tests.nn.test_block import build, config_of
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.nn.state import load_full_state_dict, local_slices_of
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.testing import run_on_ranks

FORMS = ["kv head replicated", "sequence parallel"]


def _batch(config: BlockConfig, dp_rank: int) -> BlockInputs:
    """Other data for every data-parallel rank, equal on the ranks of one TP group."""
    return draw_inputs(config, seed=10 + dp_rank, device="cpu", dtype=torch.float64, seq_len=config.seq_len)


def _loss(model: nn.Module, inputs: BlockInputs) -> Tensor:
    return model(*inputs).sin().sum()


def _expected(config: BlockConfig, full: dict[str, Tensor], dp: int) -> dict[str, Tensor]:
    """Gradients of the mean over the data-parallel ranks, on one device."""
    single = build(config, Collectives(None), full)
    for rank in range(dp):
        (_loss(single, _batch(config, rank)) / dp).backward()
    return {name: p.grad for name, p in single.named_parameters() if p.grad is not None}


def _fsdp_errors(mesh: DeviceMesh, config: BlockConfig, *, compiled: bool) -> dict[str, float]:
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    comm = Collectives(mesh.get_group("tp"))
    plain = build(config, comm, full)  # knows the layouts under their own names
    stack = build(config, comm, full)
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(stack, mesh=mesh["dp"])
    if compiled:
        for layer in stack.layers:
            layer.compile(backend="aot_eager")
    _loss(stack, _batch(config, mesh.get_local_rank("dp"))).backward()
    return _errors(stack, plain, _expected(config, full, mesh["dp"].size()))


def _dp_errors(mesh: DeviceMesh, config: BlockConfig, *, sums_over: str) -> dict[str, float]:
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    stack = build(config, Collectives(mesh.get_group("tp")), full)
    _loss(stack, _batch(config, mesh.get_local_rank("dp"))).backward()
    for parameter in stack.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh.get_group(sums_over))
        parameter.grad /= mesh["dp"].size()
    return _errors(stack, stack, _expected(config, full, mesh["dp"].size()))


def _errors(stack: nn.Module, plain: nn.Module, expected: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    wanted = local_slices_of(expected, module=plain)
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name] = ((grad - wanted[name]).norm() / expected[name].norm()).item()
    return found


def _graphs(mesh: DeviceMesh) -> list[tuple[str, str]]:
    """Graphs of a compiled MLP over the mesh's TP group, which has a different name on every data-parallel rank."""
    config, capture = config_of("wan", "full", num_layers=1), GraphCapture()
    torch._dynamo.reset()
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    stack = build(config, Collectives(mesh.get_group("tp")), full)
    name = mesh.get_group("tp").group_name
    compiled = torch.compile(stack.layers[0].mlp, backend=capture, fullgraph=True)
    compiled(_batch(config, 0).x_BSD.requires_grad_()).sum().backward()
    return [(kind, text.replace(f"'{name}'", "'tp'")) for kind, text in capture.texts]


def _worker() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        "fsdp": {form: _fsdp_errors(mesh, config_of(form, "full"), compiled=False) for form in FORMS},
        "fsdp compiled": _fsdp_errors(mesh, config_of("wan 2.1", "full", num_layers=1), compiled=True),
        "dp": {form: _dp_errors(mesh, config_of(form, "full"), sums_over="dp") for form in FORMS},
        "wrong axis": _dp_errors(mesh, config_of("wan 2.1", "full"), sums_over="tp"),
        "graphs": _graphs(mesh),
        "state": _state(mesh),
    }


def _state(mesh: DeviceMesh) -> bool:
    """The full state dict of a stack that FSDP2 shards again, loaded before and equal after."""
    config = config_of("kv head replicated", "full")
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    with torch.device("meta"):
        stack = TransformerStack(config, Collectives(mesh.get_group("tp")), num_layers=config.num_layers)
    stack.to_empty(device="cpu")
    load_full_state_dict(stack, full)
    local = {name: p.detach().clone() for name, p in stack.named_parameters()}
    fully_shard(stack, mesh=mesh["dp"])
    return all(torch.equal(p.full_tensor(), local[name]) for name, p in stack.named_parameters())


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, world_size=4, timeout_s=240)


@pytest.mark.parametrize("axis", ["fsdp", "dp"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_over_both_axes_equal_one_device(ranks: list[dict[str, Any]], axis: str, form: str) -> None:
    assert {k: e for r in ranks for k, e in r[axis][form].items() if not e < 1e-12} == {}


def test_compiled_blocks_under_fsdp_equal_one_device(ranks: list[dict[str, Any]]) -> None:
    assert {k: e for r in ranks for k, e in r["fsdp compiled"].items() if not e < 1e-12} == {}


def test_summing_over_the_wrong_axis_is_wrong(ranks: list[dict[str, Any]]) -> None:
    assert min(e for r in ranks for e in r["wrong axis"].values()) > 0.1


def test_graphs_over_the_tp_axis_differ_in_nothing_but_the_group_name(ranks: list[dict[str, Any]]) -> None:
    assert len({str(r["graphs"]) for r in ranks}) == 1
    assert [kind for kind, _ in ranks[0]["graphs"]] == ["dynamo", "forward", "backward"]


def test_fsdp_keeps_the_bits_of_the_tp_shards(ranks: list[dict[str, Any]]) -> None:
    assert all(r["state"] for r in ranks)
