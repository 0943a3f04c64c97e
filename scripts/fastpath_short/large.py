"""Outputs of more than 2^31 elements of every fast path, compared in some rows, also the last: $OUT/large.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import DEVICE, DRY, EPS, SIZE, WIDTH, Report, in_float64, randn, rotary, weight  # isort: skip

import torch

import tpcompile.fastpath.kernels.all  # noqa: F401  registers them
from tpcompile.fastpath import registered
from tpcompile.fastpath.kernels.all_reduce_norm import words_of
from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_words
from tpcompile.numerics.error_ratio import relative

MANY = 2**10 if DRY else 2**31


def looked_at(name: str) -> dict[str, Any]:
    """The first output has more than `MANY` elements; some rows are compared with the plain code in float64."""
    path, rows = registered()[name], MANY // WIDTH + 5
    given = CALLS[name](rows)
    outputs = path.launcher(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    at = torch.tensor(sorted({0, 1, rows // 2, *range(rows - 8, rows)}), device=DEVICE)
    part = {key: taken(value, rows, at) for key, value in given.items() if key != "exchange"}
    wanted = path.replaces(**in_float64(part))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    errors = [relative(taken(x, rows, at), y) for x, y in zip(outputs, wanted, strict=True)]
    size = outputs[0].numel()
    peak_gb = 0.0 if DRY else torch.cuda.max_memory_allocated() / 1e9
    del given, outputs, part, wanted
    if not DRY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if not (max(errors) < 0.01 and size > MANY):
        raise AssertionError(f"errors {errors} in {size} elements")
    return {"elements": size, "worst error": f"{max(errors):.2g}", "GB": round(peak_gb, 1)}


def taken(value: Any, rows: int, at: Any) -> Any:
    """The rows `at`, in the dim that has `rows` elements."""
    for dim, size in enumerate(getattr(value, "shape", ())):
        if size == rows:
            return value.index_select(dim, at)
    return value


def per_head(rows: int) -> dict[str, Any]:
    given = rotary(rows, q_BSd=WIDTH, k_BSc=SIZE)
    kept = {name: value for name, value in given.items() if "weight" not in name}
    return {**kept, "q_weight_E": weight(SIZE), "k_weight_E": weight(SIZE)}


def tokens_of(rows: int, *names: str) -> dict[str, Any]:
    return {name: randn(rows, WIDTH) for name in names}


def modulated(rows: int) -> dict[str, Any]:
    activations = {name: x[None] for name, x in tokens_of(rows, "x_BSD", "branch_BSD").items()}
    parts = {name: torch.randn(1, WIDTH, device=DEVICE) for name in ("gate_BD", "shift_BD", "scale_BD")}
    return {**activations, **parts, "eps": EPS}


def alone(rows: int, row_words: int) -> Any:
    """An exchange of one rank."""
    memory = torch.zeros(num_words(1, num_rows=rows, row_words=row_words), dtype=torch.int64, device=DEVICE)
    return Exchange.between([memory.data_ptr()], rank=0, num_rows=rows, row_words=row_words, memory=memory)


CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "qkv_pack_rmsnorm_rope": lambda rows: rotary(rows, qkv=WIDTH + 2 * SIZE),
    "qk_norm_rope": lambda rows: rotary(rows, q_BSd=WIDTH, k_BSc=SIZE) | {"counts": (WIDTH, SIZE)},
    "qk_head_norm_rope": per_head,
    "qk_norm_rope_exchange": lambda rows: (
        rotary(rows, q_BSd=WIDTH, k_BSc=SIZE) | {"counts": (WIDTH, SIZE), "exchange": alone(rows, 2)}
    ),
    "add_rms_norm": lambda rows: tokens_of(rows, "x_D", "branch_D") | {"weight_D": weight(WIDTH), "eps": EPS},
    "add_modulated_norm": modulated,
    "gelu_tanh": lambda rows: tokens_of(rows, "x_f"),
    "linear_gelu_tanh": lambda rows: {
        "x_I": randn(rows, SIZE),
        "weight_fI": randn(WIDTH, SIZE),
        "bias_f": weight(WIDTH),
    },
    "silu_mul": lambda rows: tokens_of(rows, "gate_f", "up_f"),
    "all_reduce_add_rms_norm": lambda rows: (
        tokens_of(rows, "x_D", "partial_D")
        | {"weight_D": weight(WIDTH), "eps": EPS, "exchange": alone(rows, words_of(WIDTH, torch.bfloat16, rows))}
    ),
}
"""Fast path -> its arguments for so many rows."""


if __name__ == "__main__":
    report = Report("large")
    with torch.no_grad():
        for name in CALLS:
            report.run(name, lambda name=name: looked_at(name))
