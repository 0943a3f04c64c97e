"""Full weights and inputs, and their slices per rank; no ranks are started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError, TpCompileError
from tpcompile.layout import ShardSpec
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.sharding import specs_of
from tpcompile.nn.state import load_full_state_dict, local_slices_of
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights, head_scales

CONFIG = BlockConfig(
    style="llama",
    dim=32,
    num_heads=8,
    num_kv_heads=4,
    ffn_dim=24,
    num_layers=2,
    qk_norm="full",
    bias=True,
    causal=True,
    eps=1e-6,
    batch=2,
    seq_len=6,
    dtype="float32",
)


class Place(Collectives):
    """A place in a group that does not exist."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size


def _stack(comm: Collectives, config: BlockConfig = CONFIG) -> TransformerStack:
    with torch.device("meta"):
        stack = TransformerStack(config, comm, num_layers=config.num_layers)
    return stack.to_empty(device="cpu")


@pytest.fixture(scope="module")
def full() -> dict[str, Tensor]:
    return draw_stack_weights(CONFIG, seed=0, dtype=torch.float32, device="cpu")


def _loaded(full: dict[str, Tensor], size: int) -> list[TransformerStack]:
    stacks = [_stack(Place(rank, size)) for rank in range(size)]
    for stack in stacks:
        load_full_state_dict(stack, full)
    return stacks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_concatenate_to_the_full_weights_bit_for_bit(full: dict[str, Tensor], size: int) -> None:
    stacks = _loaded(full, size)
    for name, spec in specs_of(stacks[0]).items():
        shards = [dict(stack.named_parameters())[name].detach() for stack in stacks]
        if spec.dim is None:
            assert all(torch.equal(shard, full[name]) for shard in shards)
            continue
        local = [part.size // size for part in spec.packed]
        parts = zip(*(shard.split(local, spec.dim) for shard in shards), strict=True)
        joined = torch.cat([torch.cat(pieces, spec.dim) for pieces in parts], spec.dim)
        assert torch.equal(joined, full[name]), name


def test_packed_weight_is_sharded_per_part_not_by_chunk(full: dict[str, Tensor]) -> None:
    name = "layers.0.attention.wqkv.weight"
    q, k, v = full[name].split((32, 16, 16))
    stacks = _loaded(full, 2)
    for rank, stack in enumerate(stacks):
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        assert torch.equal(stack.layers[0].attention.wqkv.weight, expected)
        assert not torch.equal(full[name].chunk(2)[rank], expected), "a chunk of the packed matrix must not fit"


def test_gradient_is_sliced_like_its_parameter(full: dict[str, Tensor]) -> None:
    for stack in _loaded(full, 2):
        for name, parameter in stack.named_parameters():
            assert torch.equal(local_slices_of({name: full[name] * 3}, module=stack)[name], parameter.detach() * 3)


def test_every_parameter_can_show_a_mistake(full: dict[str, Tensor]) -> None:
    for name in specs_of(_stack(Collectives(None))):
        assert full[name].std() > 0.01, name
        if name.endswith("norm.weight"):
            assert (full[name] != 1).all(), name
        if name.endswith("bias"):
            assert (full[name] != 0).all(), name


def test_q_and_k_rows_and_the_input_are_head_skewed(full: dict[str, Tensor]) -> None:
    weight = full["layers.0.attention.wqkv.weight"]
    for rows, heads in ((weight[:32], 8), (weight[32:48], 4)):
        scales = rows.unflatten(0, (heads, 4)).flatten(1).std(1)
        assert scales[-1] / scales[0] > 8
    x = draw_inputs(CONFIG, seed=1, device="cpu", dtype=torch.float32, seq_len=64)[0]
    scales = x.unflatten(-1, (8, 4)).permute(2, 0, 1, 3).flatten(1).std(1)
    assert scales[-1] / scales[0] > 12
    assert head_scales(2, 4, device="cpu").tolist() == [0.25, 0.25, 4, 4]
    assert head_scales(-2, 4, device="cpu").tolist() == [4, 4, 0.25, 0.25]


def test_same_seed_same_numbers_in_every_dtype(full: dict[str, Tensor]) -> None:
    again = draw_stack_weights(CONFIG, seed=0, dtype=torch.float64, device="cpu")
    other = draw_stack_weights(CONFIG, seed=1, dtype=torch.float32, device="cpu")
    assert all(torch.equal(full[name].double(), again[name]) for name in full)
    assert not any(torch.equal(full[name], other[name]) for name in full)


def test_inputs_have_the_promised_shapes_and_table_dtypes() -> None:
    for dtype, table in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        x, cos, sin, *_ = draw_inputs(CONFIG, seed=1, device="cpu", dtype=dtype, seq_len=5)
        assert (x.shape, x.dtype) == ((2, 5, 32), dtype)
        assert (cos.shape, cos.dtype, sin.shape, sin.dtype) == ((5, 2), table, (5, 2), table)
        assert torch.allclose(cos.square() + sin.square(), torch.ones_like(cos))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda full: full.pop("layers.1.mlp.down.weight"), r"missing \['layers.1.mlp.down.weight'\]"),
        (lambda full: full.update(extra=torch.ones(1)), r"unexpected \['extra'\]"),
        (
            lambda full: full.update({"layers.0.mlp.down.weight": torch.ones(32, 12)}),
            r"\(32, 12\), expected \(32, 24\)",
        ),
        (
            lambda full: full.update({"layers.0.mlp.down.bias": torch.ones(32).double()}),
            "float64, expected torch.float32",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_state_dict_that_does_not_fit_is_refused_and_nothing_is_copied(
    full: dict[str, Tensor], change: Callable[[dict[str, Tensor]], object], text: str
) -> None:
    stack = _stack(Place(1, 2))
    nn.init.zeros_(stack.layers[0].attention_norm.weight)
    changed = dict(full)
    change(changed)
    with pytest.raises(ConfigError, match=text):
        load_full_state_dict(stack, changed)
    assert not stack.layers[0].attention_norm.weight.any()


def test_unknown_parameter_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^'layers\.9\.x' "):
        local_slices_of({"layers.9.x": torch.ones(1)}, module=_stack(Collectives(None)))


class Parent(nn.Module):
    """Declares the parameters of its children, which say nothing themselves, by dotted names."""

    def __init__(self, comm: Collectives, specs: dict[str, ShardSpec] | None = None) -> None:
        super().__init__()
        self.comm = comm
        self.n1, self.up = nn.LayerNorm(4, bias=False), nn.Linear(4, 6 // comm.size, bias=False)
        self.specs = {"n1.weight": ShardSpec(), "up.weight": ShardSpec(dim=0, parts=(6,))} if specs is None else specs

    def shard_specs(self) -> dict[str, ShardSpec]:
        return self.specs


def test_a_parent_may_declare_its_childrens_parameters() -> None:
    full = {"n1.weight": torch.arange(4.0), "up.weight": torch.arange(24.0).view(6, 4)}
    for rank in range(2):
        parent = Parent(Place(rank, 2))
        assert specs_of(nn.Sequential(parent))["0.up.weight"] == ShardSpec(dim=0, parts=(6,))
        load_full_state_dict(parent, full)
        assert torch.equal(parent.up.weight, full["up.weight"].chunk(2)[rank])
        assert torch.equal(local_slices_of(full, module=parent)["n1.weight"], full["n1.weight"])


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ({"n1.weight": ShardSpec()}, r"no layout is declared for \['up.weight'\]"),
        ({"n1.weight": ShardSpec(), "up.wieght": ShardSpec()}, r"declares \['up.wieght'\], which are no parameters"),
    ],
    ids=["missing", "misspelt"],
)
def test_a_declaration_that_does_not_fit_is_refused(specs: dict[str, ShardSpec], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        specs_of(Parent(Place(0, 2), specs))


def test_two_declarations_of_one_parameter_must_agree() -> None:
    class Grandparent(nn.Module):
        def __init__(self, spec: ShardSpec) -> None:
            super().__init__()
            self.child, self.spec = Parent(Place(0, 2)), spec

        def shard_specs(self) -> dict[str, ShardSpec]:
            return {"child.n1.weight": self.spec}

    assert set(specs_of(Grandparent(ShardSpec()))) == {"child.n1.weight", "child.up.weight"}
    with pytest.raises(ConfigError, match=r"^child\.n1\.weight .*twice"):
        specs_of(Grandparent(ShardSpec(dim=0, parts=(8,))))


def _plain(comm: Collectives) -> nn.Module:
    """No declaration at all."""
    return nn.ModuleDict({"up": nn.Linear(4, 6 // comm.size), "down": nn.Linear(6 // comm.size, 4)})


@pytest.mark.parametrize("up", [0, ShardSpec(dim=0, parts=(6,))], ids=["dim", "spec"])
def test_a_plain_module_gets_its_layouts_by_pattern(up: int | ShardSpec) -> None:
    full = {name: p.detach() for name, p in _plain(Collectives(None)).named_parameters()}
    for rank in range(2):
        module, comm = _plain(Place(rank, 2)), Place(rank, 2)
        layouts = {"up.*": up, "*.weight": -1}  # the first that fits; what none fits is replicated
        load_full_state_dict(module, full, layouts=layouts, comm=comm)
        assert torch.equal(module["up"].weight, full["up.weight"].chunk(2)[rank])
        assert torch.equal(module["up"].bias, full["up.bias"].chunk(2)[rank])
        assert torch.equal(module["down"].weight, full["down.weight"].chunk(2, 1)[rank])
        assert torch.equal(module["down"].bias, full["down.bias"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layouts": None}, r"no layout is declared for \['down.bias', .*pass layouts="),
        ({"layouts": {"wq.*": 0}}, r"'wq.\*' fits no parameter; there are up.weight, up.bias"),
        ({"layouts": {"up.*": 0}}, r"down.weight: full shape \(4, 6\), expected \(4, 3\)"),
        (
            {"layouts": {"up.*": ShardSpec(dim=0, parts=(6,))}, "comm": None},
            r"up.weight is a shard, \(3, 4\) of \(6, 4\), over ranks that are not known",
        ),
    ],
    ids=["no layouts", "no such name", "a forgotten one", "no ranks"],
)
def test_layouts_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    full = {name: p.detach() for name, p in _plain(Collectives(None)).named_parameters()}
    with pytest.raises(ConfigError, match=text):
        load_full_state_dict(_plain(Place(1, 2)), full, **({"comm": Place(1, 2)} | options))


def test_undeclared_parameter_is_our_bug_not_a_guess() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def shard_specs(self) -> dict[str, ShardSpec]:
            return {"weight": ShardSpec()}

    with pytest.raises(TpCompileError, match="scale"):
        specs_of(Forgetful())
