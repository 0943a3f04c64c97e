"""Wan 2.1 checkpoints: our blocks on 1, 2 and 4 gloo ranks against diffusers' own, and both namings of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.checkpoints import num_layers, wan, wan_original
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import full_state_dict, gather_full, load_full_state_dict
from tpcompile.testing import run_on_ranks

HEADS, HEAD_SIZE, LAYERS, TEXT = 4, 14, 2, 5
WAN = {
    "num_attention_heads": HEADS, "attention_head_dim": HEAD_SIZE, "ffn_dim": 36, "num_layers": LAYERS,
    "in_channels": 3, "out_channels": 3, "text_dim": 8, "freq_dim": 16,
}  # fmt: skip
ORIGINAL = {
    "_class_name": "WanModel", "_diffusers_version": "0.30.0", "dim": HEADS * HEAD_SIZE, "eps": 1e-6, "ffn_dim": 36,
    "freq_dim": 16, "in_dim": 3, "model_type": "t2v", "num_heads": HEADS, "num_layers": LAYERS, "out_dim": 3,
    "text_len": TEXT,
}  # fmt: skip
VIDEO = (2, 3, 2, 6, 4)  # batch, channels, frames, height, width: 2 x 3 x 2 patches
GRID = (2, 3, 2)
RANKS = (1, 2, 4)
TOLERANCE = 1e-5  # relative to the largest element, float32 on both sides


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def wan_model() -> nn.Module:
    """diffusers' model with weights that nothing is trivial in."""
    model = pytest.importorskip("diffusers").WanTransformer3DModel(**WAN).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                is_small = name.endswith("bias") or "scale_shift_table" in name
                parameter.copy_(noise * (0.3 if is_small else parameter[0].numel() ** -0.5))
    return model


def wan_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    text = torch.randn(VIDEO[0], TEXT, WAN["text_dim"], generator=generator)
    video = torch.randn(VIDEO, generator=generator)
    return {"hidden_states": video, "timestep": torch.tensor([7, 900]), "encoder_hidden_states": text}


def build(state: dict[str, Tensor], comm: Collectives, **options: Any) -> TransformerStack:
    with torch.device("meta"):
        stack = TransformerStack(wan.block_args(WAN, **options), comm, num_layers=num_layers(WAN))
    stack.to_empty(device="cpu")
    load_full_state_dict(stack, wan.key_map(WAN).to_full(state))
    return stack


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What goes into diffusers' blocks, what each of them returns, and the gradients of all of them."""
    model, seen = wan_model(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, result: seen.append((args, result)))
    sample = model(**wan_inputs()).sample
    (hidden, context, modulation, _), _ = seen[0]
    outputs = [result for _, result in seen]
    weights = torch.randn(outputs[-1].shape, generator=torch.Generator().manual_seed(3))
    blocks = dict(model.blocks.named_parameters(prefix="blocks"))
    inputs = [hidden, context, modulation]
    *grads, d_hidden, d_context, d_modulation = torch.autograd.grad(
        (outputs[-1] * weights).sum(), [*blocks.values(), *inputs]
    )
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "inputs": [t.detach() for t in inputs],
        "outputs": [t.detach() for t in outputs],
        "weights": weights,
        "grads": dict(zip(blocks, grads, strict=True)),
        "input grads": [d_hidden, d_context, d_modulation],
        "sample": sample.detach(),
    }


def compare(reference: dict[str, Any], comm: Collectives, **options: Any) -> dict[str, float]:
    """Relative errors of every block's output and of all gradients, these by diffusers' names."""
    stack = build(reference["state"], comm, **options)
    hidden, context, modulation = inputs = [t.clone().requires_grad_() for t in reference["inputs"]]
    tables = wan.rope_tables(WAN, GRID)
    outputs: list[Tensor] = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda _, args, result: outputs.append(result))
    y = stack(hidden, *tables, modulation, context)
    if stack.sequence_parallel:
        outputs = [comm.all_gather(t, dim=0, dst="I").transpose(0, 1) for t in outputs]
    (y * reference["weights"]).sum().backward()
    errors = {f"block {i}": relative_error(ours.detach(), reference["outputs"][i]) for i, ours in enumerate(outputs)}
    grads = {name: gather_full(name, p.grad, module=stack) for name, p in stack.named_parameters()}
    ours = wan.key_map(WAN).to_checkpoint(grads)
    assert set(ours) == set(reference["grads"])
    errors |= {name: relative_error(ours[name], grad) for name, grad in reference["grads"].items()}
    pairs = zip(("hidden", "context", "modulation"), inputs, reference["input grads"], strict=True)
    return errors | {f"grad of {name}": relative_error(x.grad, grad) for name, x, grad in pairs}


def break_it(reference: dict[str, Any], comm: Collectives) -> dict[str, float]:
    """Relative errors of the last block's output when one thing is wrong."""
    hidden, context, modulation = reference["inputs"]
    tables = wan.rope_tables(WAN, GRID)
    full = wan.key_map(WAN).to_full(reference["state"])
    errors = {}
    for name in ("attention.wqkv", "cross_attention.wkv"):
        stack, key = build(reference["state"], comm), f"layers.0.{name}.weight"
        with torch.no_grad():
            stack.get_parameter(key).copy_(full[key].chunk(comm.size)[comm.rank])
            errors[name] = relative_error(stack(hidden, *tables, modulation, context), reference["outputs"][-1])
    with torch.no_grad():
        stack = build(reference["state"], comm, rope="half")
        errors["rope"] = relative_error(stack(hidden, *tables, modulation, context), reference["outputs"][-1])
    return errors


def _worker(reference: dict[str, Any]) -> dict[Any, Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    comms = {1: Collectives(None), 2: Collectives(pairs[dist.get_rank() // 2]), 4: Collectives(dist.group.WORLD)}
    found: dict[Any, Any] = {}
    for tp, comm in comms.items():
        found[tp, "plain"] = compare(reference, comm)
        found[tp, "sequence parallel"] = compare(reference, comm, sequence_parallel=True)
    ours = wan.key_map(WAN).to_checkpoint(full_state_dict(build(reference["state"], comms[4])))
    found["differing"] = [key for key, tensor in ours.items() if not torch.equal(tensor, reference["state"][key])]
    found["returned"] = sorted(ours)
    found["broken"] = break_it(reference, comms[2])
    return found


@pytest.fixture(scope="module")
def ranks(reference: dict[str, Any]) -> list[dict[Any, Any]]:
    return run_on_ranks(_worker, reference, world_size=4, timeout_s=240)


@pytest.mark.parametrize("layout", ["plain", "sequence parallel"])
@pytest.mark.parametrize("tp", RANKS)
def test_wan_blocks_and_gradients_are_those_of_diffusers(ranks: list[dict[Any, Any]], tp: int, layout: str) -> None:
    for found in ranks:
        errors = found[tp, layout]
        assert {"block 0", "block 1", "blocks.1.attn1.to_k.weight", "blocks.0.scale_shift_table"} <= set(errors)
        assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


def test_wan_state_dict_comes_back_from_four_ranks_bit_for_bit(
    ranks: list[dict[Any, Any]], reference: dict[str, Any]
) -> None:
    for found in ranks:
        assert found["differing"] == []
        assert found["returned"] == sorted(key for key in reference["state"] if key.startswith("blocks."))


@pytest.mark.parametrize("broken", ["attention.wqkv", "cross_attention.wkv", "rope"])
def test_a_chunked_packed_weight_or_the_other_rope_gives_wrong_blocks(ranks: list[dict[Any, Any]], broken: str) -> None:
    assert all(found["broken"][broken] > 1000 * TOLERANCE for found in ranks)


class AllBlocks(nn.Module):
    """Our stack in the place of diffusers' blocks."""

    def __init__(self, stack: TransformerStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, hidden: Tensor, context: Tensor, modulation: Tensor, _: Any) -> Tensor:
        return self.stack(hidden, *wan.rope_tables(WAN, GRID), modulation, context)


@torch.no_grad()
def test_diffusers_model_with_our_stack_for_its_blocks_returns_the_same_video(reference: dict[str, Any]) -> None:
    model = wan_model()
    model.blocks = nn.ModuleList([AllBlocks(build(reference["state"], Collectives(None)))])
    assert relative_error(model(**wan_inputs()).sample, reference["sample"]) < TOLERANCE


def test_wan_names_of_the_original_release_are_those_diffusers_converts(reference: dict[str, Any]) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    full = dict(wan.key_map(WAN).to_full(reference["state"]))
    original = wan_original.key_map(ORIGINAL).to_checkpoint(full)
    assert {"blocks.1.self_attn.q.weight", "blocks.0.cross_attn.norm_k.weight", "blocks.0.norm3.bias"} <= set(original)
    back = wan_original.key_map(ORIGINAL).to_full(original | {"head.modulation": torch.ones(1)})
    assert back.keys() == full.keys() and all(torch.equal(back[name], full[name]) for name in full)
    converted = convert_wan_transformer_to_diffusers(dict(original))
    assert sorted(converted) == sorted(key for key in reference["state"] if key.startswith("blocks."))
    assert all(torch.equal(tensor, reference["state"][key]) for key, tensor in converted.items())


def test_both_wan_configs_describe_the_same_block() -> None:
    ours, original = wan.block_args(WAN), wan_original.block_args(ORIGINAL)
    assert num_layers(WAN) == num_layers(ORIGINAL)
    assert original == ours.model_copy(update={"head_size": None})
    assert (ours.dim, ours.head_dim, ours.rope, ours.norm_affine) == (
        HEADS * HEAD_SIZE,
        HEAD_SIZE,
        "interleaved",
        False,
    )
