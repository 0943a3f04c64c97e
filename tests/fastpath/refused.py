"""Device -> arguments of a wrong dtype, stride, width or batch, which the fast paths that ship must refuse."""

# B batch, S sequence, D width; q and k of 2 heads of 8
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tpcompile.fastpath.certify.at_once import between, shared_words
from tpcompile.fastpath.certify.trials import Refusal
from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_words

_ROWS, _WORDS, _WIDTH = 6, 16, 16
_MANY_ROWS = 40
"""So many rows that an exchange sends them densely."""
_EPS = 1e-6


def add_rms_norm(device: torch.device) -> Iterator[Refusal]:
    right = {"x_D": _rows(device), "branch_D": _rows(device), "weight_D": _vector(device), "eps": _EPS}
    yield _float64(right, "x_D")
    yield _spoiled(right, "a branch that is wider", branch_D=_rows(device, _WIDTH + 2))
    yield _spoiled(right, "a weight that is wider", weight_D=_vector(device, _WIDTH + 2))


def add_modulated_norm(device: torch.device) -> Iterator[Refusal]:
    modulation = {name: torch.ones(2, _WIDTH, device=device) for name in ("gate_BD", "shift_BD", "scale_BD")}
    right = {"x_BSD": _rows(device), "branch_BSD": _rows(device), **modulation, "eps": _EPS}
    yield _float64(right, "x_BSD")
    yield _spoiled(right, "a branch that is wider", branch_BSD=_rows(device, _WIDTH + 2))
    yield _spoiled(right, "a gate that is wider", gate_BD=torch.ones(2, _WIDTH + 2, device=device))


def gelu_tanh(device: torch.device) -> Iterator[Refusal]:
    yield _float64({"x_f": _rows(device)}, "x_f")


def silu_mul(device: torch.device) -> Iterator[Refusal]:
    right = {"gate_f": _rows(device), "up_f": _rows(device)}
    yield _float64(right, "gate_f")
    yield _spoiled(right, "an up projection that is wider", up_f=_rows(device, _WIDTH + 2))


def linear_gelu_tanh(device: torch.device) -> Iterator[Refusal]:
    right = {"x_I": _rows(device), "weight_fI": torch.ones(8, _WIDTH, device=device), "bias_f": _vector(device, 8)}
    yield _spoiled(right, "all in float64", **{name: value.double() for name, value in right.items()})
    yield _spoiled(right, "a bias in float64", bias_f=right["bias_f"].double())
    yield _spoiled(right, "a weight that is wider", weight_fI=torch.ones(8, _WIDTH + 2, device=device))
    yield _spoiled(right, "one bias for all", bias_f=_vector(device, 1))
    yield _spoiled(right, "a bias for each token", bias_f=torch.ones(6, 8, device=device))


def few_rows_linear(device: torch.device) -> Iterator[Refusal]:
    yield from _few_rows(device, weight="weight_OI", bias="bias_O")


def few_rows_linear_gelu(device: torch.device) -> Iterator[Refusal]:
    yield from _few_rows(device, weight="weight_fI", bias="bias_f")


def _few_rows(device: torch.device, *, weight: str, bias: str) -> Iterator[Refusal]:
    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device, dtype=torch.bfloat16)

    right = {"x_I": ones(2, 3, 768), weight: ones(64, 768), bias: ones(64)}
    yield _spoiled(right, "all in float32", **{name: value.float() for name, value in right.items()})
    yield _spoiled(right, "a weight in float16", **{weight: right[weight].half()})
    yield _spoiled(right, "a bias in float16", **{bias: right[bias].half()})
    yield _spoiled(right, "9 rows", x_I=ones(9, 768))
    yield _spoiled(right, "outputs that are no multiple of 64", **{weight: ones(96, 768), bias: ones(96)})
    yield _spoiled(right, "inputs that are no multiple of 128", x_I=ones(6, 832), **{weight: ones(64, 832)})
    yield _spoiled(right, "few inputs", x_I=ones(6, 640), **{weight: ones(64, 640)})
    yield _spoiled(right, "a weight that is wider", **{weight: ones(64, 896)})
    yield _spoiled(right, "one bias for all", **{bias: ones(1)})
    yield _spoiled(right, "a weight with gaps", **{weight: ones(64, 896)[:, :768]})


def qk_norm_rope(device: torch.device) -> Iterator[Refusal]:
    weights = {"q_weight_d": _vector(device), "k_weight_c": _vector(device)}
    yield from _of_heads(device, {**weights, "counts": (_WIDTH, _WIDTH)}, weight="q_weight_d")


def qkv_pack_rmsnorm_rope(device: torch.device) -> Iterator[Refusal]:
    heads = _heads(device, {"q_weight_d": _vector(device), "k_weight_c": _vector(device)})
    parts = [heads.pop("q_BSd"), *[heads.pop("k_BSc")] * 2]
    right = {"qkv": torch.cat(parts, -1), **heads}
    yield _float64(right, "qkv")
    yield _float64(right, "cos_SR")
    yield _spoiled(right, "a weight that is wider", q_weight_d=_vector(device, _WIDTH + 2))
    yield _spoiled(right, "tables of fewer tokens", cos_SR=torch.ones(2, 4, device=device))


def qk_head_norm_rope(device: torch.device) -> Iterator[Refusal]:
    weights = {"q_weight_E": _vector(device, 8), "k_weight_E": _vector(device, 8)}
    yield from _of_heads(device, weights, weight="q_weight_E")


def qk_norm_rope_exchange(device: torch.device) -> Iterator[Refusal]:
    weights = {"q_weight_d": _vector(device), "k_weight_c": _vector(device)}
    more = {**weights, "counts": (_WIDTH, _WIDTH)}
    yield from _of_heads(device, {**more, "exchange": _exchange(device)}, weight="q_weight_d")
    right = _heads(device, {**more, "exchange": _exchange(device, num_rows=2)})
    yield Refusal(name="more rows than the exchange holds", arguments=right)


def all_reduce_add_rms_norm(device: torch.device) -> Iterator[Refusal]:
    right = {"x_D": _rows(device), "partial_D": _rows(device), "weight_D": _vector(device), "eps": _EPS}
    right["exchange"] = _exchange(device)
    yield _spoiled(right, "a partial sum with gaps", partial_D=_rows(device, 2 * _WIDTH)[..., ::2])
    yield _spoiled(right, "a partial sum that is wider", partial_D=_rows(device, _WIDTH + 2))
    yield _spoiled(right, "a partial sum for more rows", partial_D=torch.ones(3, 3, _WIDTH, device=device))
    yield _spoiled(right, "more rows than the exchange holds", exchange=_exchange(device, num_rows=2))
    no_flag = _WIDTH // 2
    yield _spoiled(right, "wider rows than the exchange holds", exchange=_exchange(device, row_words=no_flag))
    too_few = _exchange(device, row_words=_WIDTH - 2)
    yield _spoiled(right, "a word for each value, and an exchange that holds fewer", exchange=too_few)
    many = _exchange(device, num_rows=_MANY_ROWS, row_words=no_flag)
    yield _spoiled(right, "dense rows and a flag, and an exchange that holds only the rows", exchange=many)


def _of_heads(device: torch.device, more: dict[str, Any], *, weight: str) -> Iterator[Refusal]:
    right = _heads(device, more)
    yield _float64(right, "q_BSd")
    yield _float64(right, "cos_SR")
    yield _spoiled(right, "a weight that is wider", **{weight: _vector(device, right[weight].shape[0] + 2)})


def _heads(device: torch.device, more: dict[str, Any]) -> dict[str, Any]:
    tables = {"cos_SR": torch.ones(3, 4, device=device), "sin_SR": torch.ones(3, 4, device=device)}
    return {"q_BSd": _rows(device), "k_BSc": _rows(device), **tables, "eps": _EPS, **more}


def _float64(right: dict[str, Any], name: str) -> Refusal:
    return _spoiled(right, f"{name} in float64", **{name: right[name].double()})


def _spoiled(right: dict[str, Any], what: str, **wrong: Any) -> Refusal:
    return Refusal(name=what, arguments={**right, **wrong})


def _rows(device: torch.device, width: int = _WIDTH) -> Tensor:
    return torch.ones(2, 3, width, device=device)


def _vector(device: torch.device, width: int = _WIDTH) -> Tensor:
    return torch.ones(width, device=device)


def _exchange(device: torch.device, num_rows: int = _ROWS, row_words: int = _WORDS) -> Exchange:
    """An exchange of one rank, where nothing waits for a peer: a call that is accepted must return within the limit."""
    memory = shared_words(num_words(1, num_rows=num_rows, row_words=row_words), device)
    (side,) = between([memory], num_rows=num_rows, row_words=row_words, num_programs=1)
    return side
