"""Cases of the fast paths that ship with tpcompile.

Data is skewed: heads differ in scale by a factor of 16, and tokens by 1000, the smallest near the norm's epsilon. On
random-normal data alone a norm over the local shard is off by 1 to 3 %, inside the tolerance of bfloat16.
"""

# B batch, S sequence, H and G heads of q and k, E head size, R = E / 2
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tpcompile.fastpath.kernels.all  # noqa: F401  registers them
from tests.fastpath import refused
from tests.fastpath.reasons import (
    EQUIVALENT,
    EXCHANGE_EQUIVALENT,
    EXCHANGE_UNREACHED,
    FEW_ROWS_EQUIVALENT,
    LIBRARY_UNREACHED,
    ONLY_ON_GPUS,
    QK_EXCHANGE_EQUIVALENT,
    QKV_PACK_EQUIVALENT,
    UNREACHED,
)
from tpcompile.fastpath.certify.at_once import at_once
from tpcompile.fastpath.certify.fences import far_apart, spaced
from tpcompile.fastpath.certify.trials import Call, Case, PartialSum, trial
from tpcompile.fastpath.kernels.all_reduce_norm import words_of
from tpcompile.layout import Part, ShardSpec

_EPS = 1e-6
_REAL_WIDTH = 5120
"""Of Wan 14B: more elements than a program of a narrow case has, and other numbers of warps."""
_TENSORS = ("q_BSd", "k_BSc", "cos_SR", "sin_SR")


@dataclass(frozen=True)
class Heads:
    """Shape of q and k."""

    name: str
    batch: int = 1
    tokens: int = 3
    q: int = 8
    kv: int = 8
    size: int = 64
    interleaved: bool = False
    strided: bool = False
    padded: bool = False
    far: bool = False

    def parts(self, tp: int) -> tuple[Part, Part]:
        """Layout of q and of k over the ranks: whole kv heads, or replicas of them when there are more ranks."""
        replicas = max(1, tp // self.kv)
        group = self.q // self.kv if replicas == 1 else 1
        q = Part(self.q * self.size, unit=group * self.size, padded=self.padded)
        return q, Part(self.kv * self.size, unit=self.size, replicas=replicas, padded=self.padded)


HEADS = (
    Heads("5 tokens", tokens=5),
    Heads("grouped, interleaved, head size 128", q=16, kv=2, size=128, tokens=1, interleaved=True),
    Heads("5 heads of 80, padded, interleaved", q=5, kv=5, size=80, padded=True, interleaved=True),
    Heads("batch of 2, rows with gaps, 5 heads of 24, padded", batch=2, q=5, kv=5, size=24, padded=True, strided=True),
    Heads("no tokens", tokens=0),
    Heads("40 heads of 128", q=40, kv=40, size=128, tokens=1),
)


@trial("qk_norm_rope", refusals=refused.qk_norm_rope, equivalent=EQUIVALENT, unreached=UNREACHED)
def qk_norm_rope(tp: int) -> Iterator[Case]:
    """Full-width norm of q and k."""
    return _full_norms(tp, _shapes(tp))


def _full_norms(tp: int, shapes: Iterable[Heads]) -> Iterator[Case]:
    for heads in shapes:
        q_part, kv_part = heads.parts(tp)
        arguments = _activations(heads)
        arguments["q_weight_d"] = _weight(q_part.size)
        arguments["k_weight_c"] = _weight(kv_part.size)
        counts = (q_part.size * q_part.replicas, kv_part.size * kv_part.replicas)
        yield _case(heads, tp, {**arguments, "counts": (q_part.size, kv_part.size)}, counts=counts)


@trial(
    "qkv_pack_rmsnorm_rope",
    refusals=refused.qkv_pack_rmsnorm_rope,
    equivalent=QKV_PACK_EQUIVALENT,
    unreached=UNREACHED,
)
def qkv_pack_rmsnorm_rope(tp: int) -> Iterator[Case]:
    """q, k and v of one rank in one tensor."""
    for case in qk_norm_rope(tp):
        arguments = dict(case.arguments)
        q_BSd, k_BSc = arguments.pop("q_BSd"), arguments.pop("k_BSc")
        del arguments["counts"]
        memory = {name: place for name, place in case.memory.items() if name in arguments}
        if "q_BSd" in case.memory:
            memory["qkv"] = case.memory["q_BSd"]
        yield Case(
            name=case.name,
            arguments={"qkv": torch.cat((q_BSd, k_BSc, k_BSc.flip(-1)), -1), **arguments},
            outputs=(ShardSpec(), ShardSpec(), ShardSpec()),
            wide=case.wide,
            constant=case.constant,
            memory=memory,
            forward_only=case.forward_only,
        )


@trial("qk_head_norm_rope", refusals=refused.qk_head_norm_rope, equivalent=EQUIVALENT, unreached=UNREACHED)
def qk_head_norm_rope(tp: int) -> Iterator[Case]:
    """Norm of every head of q and k."""
    for heads in _shapes(tp):
        weight = _weight(heads.size)
        yield _case(heads, tp, {**_activations(heads), "q_weight_E": weight, "k_weight_E": 1 / weight})


@trial("add_rms_norm", refusals=refused.add_rms_norm, equivalent=EQUIVALENT, unreached=UNREACHED)
def add_rms_norm(tp: int) -> Iterator[Case]:
    """Tokens are replicated, or every rank has its own."""
    for tokens, width in _TOKENS:
        sharded, generator = _tokens(tokens)
        arguments = {name: _token_data(tokens, generator, width) for name in ("x_D", "branch_D")}
        arguments["weight_D"] = _weight(width)
        yield _token_case(_token_name(tokens, width), arguments, sharded)


@trial("add_modulated_norm", refusals=refused.add_modulated_norm, equivalent=EQUIVALENT, unreached=UNREACHED)
def add_modulated_norm(tp: int) -> Iterator[Case]:
    """As add_rms_norm; the modulation is equal on all ranks."""
    for tokens, width in _TOKENS:
        sharded, generator = _tokens(tokens)
        arguments = {name: _token_data(tokens, generator, width) for name in ("x_BSD", "branch_BSD")}
        for name in ("gate_BD", "shift_BD", "scale_BD"):
            arguments[name] = torch.randn(2, width, generator=generator, dtype=torch.float64)
        wide = frozenset({"gate_BD", "shift_BD", "scale_BD"})
        yield _token_case(_token_name(tokens, width), arguments, sharded, wide=wide)


@trial("gelu_tanh", refusals=refused.gelu_tanh, equivalent=EQUIVALENT, unreached=UNREACHED)
def gelu_tanh(tp: int) -> Iterator[Case]:
    """Features are sharded: more than one block of them on one rank, and an odd number on eight."""
    return _feature_cases("x_f")


@trial("silu_mul", refusals=refused.silu_mul, equivalent=EQUIVALENT, unreached=UNREACHED)
def silu_mul(tp: int) -> Iterator[Case]:
    """As gelu_tanh."""
    return _feature_cases("gate_f", "up_f")


@trial("linear_gelu_tanh", refusals=refused.linear_gelu_tanh, unreached=LIBRARY_UNREACHED)
def linear_gelu_tanh(tp: int) -> Iterator[Case]:
    """Features are sharded. Biases near -3, where GELU with erf differs by 11 %: that form is far off in any dtype."""
    for tokens, low, high in ((0, -4.0, 4.0), (1, -4.0, 4.0), (5, -4.0, 4.0), (5, -3.2, -2.8)):
        generator = torch.Generator().manual_seed(tokens)
        weight_fI = torch.randn(_FEATURES, _WIDTH, generator=generator, dtype=torch.float64) / _WIDTH**0.5
        bias_f = torch.linspace(low, high, _FEATURES, dtype=torch.float64)
        x_I = (high - low) / 4 * _token_data(tokens, generator, _WIDTH)
        rows, hidden = (ShardSpec(dim=dim, parts=(Part(_FEATURES),)) for dim in (0, 2))
        yield Case(
            name=f"2 x {tokens} tokens, biases from {low:g} to {high:g}",
            arguments={"x_I": x_I, "weight_fI": weight_fI, "bias_f": bias_f},
            shards={"weight_fI": rows, "bias_f": rows},
            outputs=(hidden,),
            memory={"x_I": spaced},
        )


_FEW_ROWS_OF = (768, 512)
"""Input features, the least that it takes, and output features, of which 8 ranks have 64 each."""


@trial("few_rows_linear", refusals=refused.few_rows_linear, equivalent=FEW_ROWS_EQUIVALENT, unreached=ONLY_ON_GPUS)
def few_rows_linear(tp: int) -> Iterator[Case]:
    """Output features are sharded; with a bias and without, with GELU and without."""
    for tokens, has_bias, gelu in ((4, True, True), (0, True, False), (1, False, False), (3, True, False)):
        case = _few_rows_case(tokens, "weight_OI", "bias_O", has_bias=has_bias)
        yield replace(case, name=f"{case.name}, {gelu = }", arguments={**case.arguments, "gelu": gelu})


@trial(
    "few_rows_linear_gelu",
    refusals=refused.few_rows_linear_gelu,
    equivalent=FEW_ROWS_EQUIVALENT,
    unreached=ONLY_ON_GPUS,
)
def few_rows_linear_gelu(tp: int) -> Iterator[Case]:
    """As linear_gelu_tanh."""
    for tokens, low, high in ((0, -4.0, 4.0), (1, -4.0, 4.0), (3, -3.2, -2.8), (4, -4.0, 4.0)):
        yield _few_rows_case(tokens, "weight_fI", "bias_f", low=low, high=high)


def _few_rows_case(
    tokens: int, weight: str, bias: str, *, has_bias: bool = True, low: float = -4.0, high: float = 4.0
) -> Case:
    width, features = _FEW_ROWS_OF
    generator = torch.Generator().manual_seed(tokens)
    arguments: dict[str, Any] = {
        "x_I": (high - low) / 4 * _token_data(tokens, generator, width),
        weight: torch.randn(features, width, generator=generator, dtype=torch.float64) / width**0.5,
        bias: torch.linspace(low, high, features, dtype=torch.float64) if has_bias else None,
    }
    rows, hidden = (ShardSpec(dim=dim, parts=(Part(features),)) for dim in (0, 2))
    return Case(
        name=f"2 x {tokens} tokens, {f'biases from {low:g} to {high:g}' if has_bias else 'no bias'}",
        arguments=arguments,
        shards={weight: rows, bias: rows} if has_bias else {weight: rows},
        outputs=(hidden,),
        memory={"x_I": spaced},
    )


_MOST_ROWS = 16

_QK_AT_ONCE = at_once(num_rows=_MOST_ROWS, row_words=2, num_programs=1)
_FEW = Heads("batch of 2, 4 rows with gaps", batch=2, tokens=2, q=5, kv=5, size=24, padded=True, strided=True)
_MANY = (
    Heads("2 x 7 tokens with gaps, 24 heads of 128", batch=2, tokens=7, q=24, kv=24, size=128, strided=True),
    Heads(
        "14 tokens, 5 heads of 80, padded, interleaved", tokens=14, q=5, kv=5, size=80, padded=True, interleaved=True
    ),
)
_MANY_FAR = Heads("5 rows 2^30 elements apart", tokens=5, q=2, kv=2, size=16, far=True)
"""As many rows as the kernel for few takes at most, and more than all programs of that for many; heads in tiles."""


@trial(
    "qk_norm_rope_exchange",
    on_ranks=_QK_AT_ONCE,
    refusals=refused.qk_norm_rope_exchange,
    equivalent=QK_EXCHANGE_EQUIVALENT,
    unreached=EXCHANGE_UNREACHED,
)
def qk_norm_rope_exchange(tp: int) -> Iterator[Case]:
    """As qk_norm_rope, and more rows."""
    return _full_norms(tp, (*_shapes(tp), _FEW, *_MANY, *([_MANY_FAR] if tp == 1 else [])))


_NORM_AT_ONCE = {
    num_programs: at_once(
        num_rows=_MOST_ROWS,
        row_words=words_of(_REAL_WIDTH, torch.float32, _MOST_ROWS),
        num_programs=num_programs,
    )
    for num_programs in (2, _MOST_ROWS)
}
"""Programs of an exchange: with one for each row, rows go out as words, and densely with fewer."""


def _norm_at_once(call: Call, ranks: list[dict[str, Any]]) -> list[tuple[Tensor, ...]]:
    """With as many programs as the case says."""
    given = [{name: value for name, value in rank.items() if name != "num_programs"} for rank in ranks]
    return _NORM_AT_ONCE[ranks[0]["num_programs"]](call, given)


@trial(
    "all_reduce_add_rms_norm",
    on_ranks=_norm_at_once,
    refusals=refused.all_reduce_add_rms_norm,
    equivalent=EXCHANGE_EQUIVALENT,
    unreached=EXCHANGE_UNREACHED,
)
def all_reduce_add_rms_norm(tp: int) -> Iterator[Case]:
    """Every rank holds a part of the sum of each token."""
    for num_programs, tokens, width in (
        (2, 0, 160),
        (2, 1, 160),
        (2, 5, 160),
        (2, 1, _REAL_WIDTH),
        (_MOST_ROWS, 5, 160),
        (_MOST_ROWS, 1, _REAL_WIDTH),
    ):
        generator = torch.Generator().manual_seed(tokens)
        arguments = {name: _token_data(tokens, generator, width=width) for name in ("x_D", "partial_D")}
        yield Case(
            name=f"{_token_name(tokens, width)}, {num_programs} programs",
            arguments={**arguments, "weight_D": _weight(width), "eps": _EPS},
            rank_arguments={"num_programs": num_programs},
            shards={"partial_D": PartialSum()},
            outputs=(ShardSpec(), ShardSpec()),
            memory=dict.fromkeys(arguments, spaced),
        )


_WIDTH = 80
_FEATURES = 2200
_SPREAD = 16
"""Tokens that are spread over the ranks, as in the sequence-parallel form; fewer are replicated."""
_TOKENS = ((0, _WIDTH), (1, _WIDTH), (5, _WIDTH), (_SPREAD, _WIDTH), (1, _REAL_WIDTH))
"""Numbers of tokens, and their width."""


def _tokens(number: int) -> tuple[ShardSpec, torch.Generator]:
    sharded = ShardSpec(dim=1, parts=(Part(number),)) if number == _SPREAD else ShardSpec()
    return sharded, torch.Generator().manual_seed(number)


def _token_name(tokens: int, width: int) -> str:
    return f"2 x {tokens} tokens of {width}" if width == _REAL_WIDTH else f"2 x {tokens} tokens"


def _token_data(tokens: int, generator: torch.Generator, width: int) -> Tensor:
    scales_S1 = 10.0 ** -(torch.arange(tokens, dtype=torch.float64) % 4)[:, None]
    return (torch.randn(2, tokens, width, generator=generator, dtype=torch.float64) + 0.5) * scales_S1


def _token_case(name: str, arguments: dict[str, Any], sharded: ShardSpec, wide: frozenset[str] = frozenset()) -> Case:
    activations = [name for name, value in arguments.items() if value.dim() == 3]
    return Case(
        name=name,
        arguments={**arguments, "eps": _EPS},
        shards=dict.fromkeys(activations, sharded),
        outputs=(sharded, sharded),
        wide=wide,
        memory=dict.fromkeys([*activations, *wide], spaced),
    )


def _feature_cases(*names: str) -> Iterator[Case]:
    sharded = ShardSpec(dim=2, parts=(Part(_FEATURES),))
    for tokens in (0, 1, 5):
        generator = torch.Generator().manual_seed(tokens)
        yield Case(
            name=f"2 x {tokens} tokens",
            arguments={name: 3 * _token_data(tokens, generator, width=_FEATURES) for name in names},
            shards=dict.fromkeys(names, sharded),
            outputs=(sharded,),
            memory=dict.fromkeys(names, spaced),
        )


def _case(heads: Heads, tp: int, arguments: dict[str, Any], **numbers: Any) -> Case:
    q_part, kv_part = heads.parts(tp)
    q_heads, kv_heads = (_as_heads(part, heads.size) for part in (q_part, kv_part))
    shards = {
        "q_BSd": ShardSpec(dim=2, parts=(q_part,)),
        "k_BSc": ShardSpec(dim=2, parts=(kv_part,)),
        "q_weight_d": ShardSpec(dim=0, parts=(q_part,)),
        "k_weight_c": ShardSpec(dim=0, parts=(kv_part,)),
    }
    return Case(
        name=heads.name,
        arguments={**arguments, "eps": _EPS, "interleaved": heads.interleaved},
        rank_arguments=numbers,
        shards={name: spec for name, spec in shards.items() if name in arguments},
        outputs=(ShardSpec(dim=1, parts=(q_heads,)), ShardSpec(dim=1, parts=(kv_heads,))),
        wide=frozenset({"cos_SR", "sin_SR"}),
        constant=frozenset({"cos_SR", "sin_SR"}),
        memory=_memory(heads),
        forward_only=heads.far,
    )


def _shapes(tp: int) -> Iterator[Heads]:
    yield from HEADS
    if tp == 1:
        yield Heads("rows 2^30 elements apart", size=16, far=True)


def _memory(heads: Heads) -> dict[str, Callable[[Tensor], Tensor]]:
    if heads.far:
        return dict.fromkeys(("q_BSd", "k_BSc"), far_apart)
    return dict.fromkeys(_TENSORS, spaced) if heads.strided else {}


def _as_heads(part: Part, size: int) -> Part:
    return Part(part.size // size, unit=part.unit // size, replicas=part.replicas, padded=part.padded)


def _activations(heads: Heads) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(heads.size * 100 + heads.tokens)
    angles_SR = torch.randn(heads.tokens, heads.size // 2, generator=generator, dtype=torch.float64) * 3
    return {
        "q_BSd": _skewed(heads, heads.q, generator),
        "k_BSc": _skewed(heads, heads.kv, generator),
        "cos_SR": angles_SR.cos(),
        "sin_SR": angles_SR.sin(),
    }


def _skewed(heads: Heads, number: int, generator: torch.Generator) -> Tensor:
    shape = (heads.batch, heads.tokens, number, heads.size)
    scales_h1 = 4 ** torch.linspace(-1, 1, number, dtype=torch.float64)[:, None]
    scales_S11 = 10.0 ** -(torch.arange(heads.tokens, dtype=torch.float64) % 4)[:, None, None]
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scales_h1 * scales_S11).flatten(2)


def _weight(size: int) -> Tensor:
    return torch.linspace(0.5, 2, size, dtype=torch.float64)
