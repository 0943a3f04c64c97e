"""In an interpreting process: the kernel for one GPU on whole tensors, and on shards -> how far it is off."""

# B batch, S sequence, E head size
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpcompile.fastpath import plain, registered
from tpcompile.fastpath.certify.fences import spaced
from tpcompile.fastpath.certify.shard_errors import Setting, prepared, ratios
from tpcompile.fastpath.certify.trials import Case, Trial, one_by_one
from tpcompile.fastpath.kernels.all import qkv_pack
from tpcompile.fastpath.registry import FastPath
from tpcompile.layout import Part, ShardSpec
from tpcompile.numerics.error_ratio import relative
from tpcompile.torch_api.interpreted import like_gpus

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Heads:
    """Shape of q, k and v."""

    name: str
    q: int
    kv: int
    size: int
    tokens: int = 3
    batch: int = 1
    interleaved: bool = False
    strided: bool = False

    def arguments(self, skew: float = 4.0) -> dict[str, Any]:
        """Whole tensors; heads differ in scale by up to `skew` squared."""
        generator = torch.Generator().manual_seed(self.q * self.size + self.tokens)
        parts = []
        for number in (self.q, self.kv, self.kv):
            shape = (self.batch, self.tokens, number, self.size)
            scales = skew ** torch.linspace(-1, 1, number, dtype=torch.float64)[:, None]
            parts.append((torch.randn(shape, generator=generator, dtype=torch.float64) * scales).flatten(2))
        angles = torch.randn(self.tokens, self.size // 2, generator=generator, dtype=torch.float64)
        return {
            "qkv": torch.cat(parts, -1),
            "q_weight_d": torch.linspace(0.5, 2, self.q * self.size, dtype=torch.float64),
            "k_weight_c": torch.linspace(0.5, 2, self.kv * self.size, dtype=torch.float64),
            "cos_SR": angles.cos(),
            "sin_SR": angles.sin(),
            "eps": 1e-6,
            "interleaved": self.interleaved,
        }

    def case(self) -> Case:
        """As the certificates have them: each rank has whole heads of q, k and v."""
        q, kv = Part(self.q * self.size, unit=self.size), Part(self.kv * self.size, unit=self.size)
        outputs = tuple(ShardSpec(dim=1, parts=(Part(number),)) for number in (self.q, self.kv, self.kv))
        return Case(
            name=self.name,
            arguments=self.arguments(),
            shards={
                "qkv": ShardSpec(dim=2, parts=(q, kv, kv)),
                "q_weight_d": ShardSpec(dim=0, parts=(q,)),
                "k_weight_c": ShardSpec(dim=0, parts=(kv,)),
            },
            outputs=outputs,
            wide=frozenset({"cos_SR", "sin_SR"}),
            constant=frozenset({"cos_SR", "sin_SR"}),
            memory={"qkv": spaced} if self.strided else {},
        )


HEADS = (
    Heads("8 heads of 64", q=8, kv=8, size=64),
    Heads("grouped, interleaved, a token", q=8, kv=2, size=128, tokens=1, interleaved=True),
    Heads("10 heads of 80, a batch of 2, rows with gaps", q=10, kv=10, size=80, batch=2, strided=True),
    Heads("6 heads of 24, interleaved", q=6, kv=6, size=24, tokens=5, interleaved=True),
    Heads("no tokens", q=8, kv=8, size=64, tokens=0),
)


def landmine() -> FastPath:
    return registered()["qkv_pack_rmsnorm_rope"]


def worst_ratios(path: FastPath, tp: int) -> dict[str, float]:
    """Case and dtype -> the largest error of q and k, as a multiple of the plain code's in that dtype."""
    trial = Trial(cases=lambda _tp: (heads.case() for heads in HEADS), on_ranks=one_by_one)
    settings = [Setting(tp, dtype, torch.device("cpu")) for dtype in DTYPES]
    known = prepared(path, [(heads.case(), setting) for heads in HEADS for setting in settings])
    return {str(one): max(ratios(path, trial, one).values()) for one in known if one.case.arguments["qkv"].numel()}


def wide(skew: float) -> tuple[Tensor, Tensor]:
    """q and k of 20 heads of 128 in bfloat16, normalised on 2 shards; and what they should be."""
    heads = Heads("wide", q=20, kv=20, size=128, tokens=4)
    given = heads.arguments(skew)
    case = heads.case()
    whole = {name: value.bfloat16() if isinstance(value, Tensor) else value for name, value in given.items()}
    shards = []
    for rank in range(2):
        own = {name: spec.take(whole[name], rank=rank, size=2).contiguous() for name, spec in case.shards.items()}
        shards.append(qkv_pack.qkv_pack_rmsnorm_rope(**{**whole, **own})[:2])
    found = [torch.cat(parts, 1) for parts in zip(*shards, strict=True)]
    exact = {name: value.double() if isinstance(value, Tensor) else value for name, value in whole.items()}
    return torch.cat(found), torch.cat(plain.qkv_pack(**exact)[:2])


def off(skew: float) -> dict[str, Any]:
    """Relative error of a shard-local norm, and whether a test with a tolerance for bfloat16 passes."""
    found, wanted = wide(skew)
    is_close = torch.allclose(found.double(), wanted, rtol=0.05, atol=0.05)
    return {"error": relative(found, wanted), "passes": is_close}


def with_local_eps() -> FastPath:
    """A negative control: the launcher with the epsilon of a thousandth."""
    path = landmine()

    def launcher(*args: Any, eps: float, **options: Any) -> Any:
        return path.launcher(*args, eps=1e-3, **options)

    return replace(path, launcher=launcher)


def no_tokens() -> Iterator[tuple[int, ...]]:
    heads = HEADS[-1]
    arguments = {name: v.float() if isinstance(v, Tensor) else v for name, v in heads.arguments().items()}
    yield from (tuple(output.shape) for output in qkv_pack.qkv_pack_rmsnorm_rope(**arguments))


def measured() -> dict[str, Any]:
    """All of it, in one process that interprets."""
    like_gpus()
    return {
        "whole": worst_ratios(landmine(), 1),
        "shards": worst_ratios(landmine(), 2),
        "broken": worst_ratios(with_local_eps(), 1),
        "normal": off(1.0),
        "skewed": off(4.0),
        "no tokens": list(no_tokens()),
    }
