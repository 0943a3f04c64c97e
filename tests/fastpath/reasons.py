"""Mutations of the fast paths that ship which no case catches -> why: they compute the same, or no case goes there.

Patterns of `Trial.equivalent` and `Trial.unreached`.
"""

from __future__ import annotations

_WARPS = "any number of warps gives the same"

EQUIVALENT = {
    "launchable(*_kernel) -> *_kernel": "how torch.compile is shown the kernel: the same kernel runs",
    "wrap_triton(kernel) -> kernel": "how torch.compile is shown the kernel: the same kernel runs",
    "block_of(elements) // 1024 -> *": "2 or 8 warps: the same results",
    "tl.cast(eps, tl.float32) -> eps": "only Inductor passes float64; tests/fastpath/test_generated.py has its PTX",
    "*.to(tl.float32) -> *": "Triton computes a product with a float32 in float32 without it",
    "*.float() -> *": "torch computes a product with a float32 tensor in float32 without it",
    "*.to(dtype) -> *": "autograd casts a gradient to the dtype of its tensor without it",
    "*.to(*.dtype) -> *": "autograd casts a gradient to the dtype of its tensor without it",
    "*(x_D, branch_D, *) -> *(branch_D, x_D, *)": "x + branch is branch + x",
    "check_rows('qk_sums', *": "qk_apply refuses the same arguments",
    "pairs < PAIRS_PER_HEAD -> pairs <= PAIRS_PER_HEAD": "the pair beyond the head is masked where it is used",
}

_EITHER_HALF = "one program takes q and one k, whichever does which"
QKV_PACK_EQUIVALENT = {
    **EQUIVALENT,
    "warps_of(q_width) // 2 -> *": _WARPS,
    "block_of(elements) -> elements": _WARPS,
    "*tl.program_id(1) == 0*": _EITHER_HALF,
}

_FAR = "takes outputs of 2^31 elements"
UNREACHED = {"tl.program_id(0).to(tl.int64) -> *": _FAR}

LIBRARY_UNREACHED = {
    "torch.ops.aten._addmm_activation(*": "the interpreter has no GPU; on one, the same cases run this call",
}

_OTHER_KERNEL = "the interpreter runs the kernel for it; on a GPU, the same cases run this one"
ONLY_ON_GPUS = {
    "few_rows_kernel*": _OTHER_KERNEL,
}
FEW_ROWS_EQUIVALENT = {
    **EQUIVALENT,
    "rows < num_rows -> rows <= num_rows": "a row beyond them is not stored",
    "total.to(out.dtype.element_ty) -> total": "Triton casts what it stores",
    "x_I.reshape(-1, width).contiguous() -> *": "a reshape of rows with gaps is dense",
}

_SUM = "a place is the sum of both"
_BITS = "the same bits"
_WIDENED = "Triton widens it where it meets a wider number"
_GRID = "any grid gives the same"
_BOTH_LATE = "both differ alike"
_MORE_THAN_0 = "more than 0 alike"

EXCHANGE_EQUIVALENT = {
    **EQUIVALENT,
    "_check_shapes(* -> _check_shapes(x_D, partial_D, *": "both must have one shape",
    "min(* -> min(*": "the smaller of both is the same",
    "*per_sm * num_programs -> *": _GRID,
    "_THREADS_PER_SM // num_threads -> *": _GRID,
    "_num_threads(block, * -> block": _WARPS,
    "num_threads // 32 -> *": _WARPS,
    "_REGISTERS_PER_SM // num_threads -> *": "any number of registers gives the same",
    "2 * _VALUES_PER_THREAD -> *": _WARPS,
    "block // per_thread -> *": _WARPS,
    "_*_PER_SM * num_programs -> *": _GRID,
    "state + _RANK -> state - _RANK": "_RANK is 0",
    "epoch.to(tl.uint64) -> epoch": _BITS,
    "tag.to(tl.int64, bitcast=True) -> tag": _BITS,
    "*.to(tl.uint32, bitcast=True) -> *": _BITS,
    "*.to(tl.int32, bitcast=True) -> *": _BITS,
    "*.to(tl.uint32) -> *": _WIDENED,
    "*.to(tl.uint64) -> *": _WIDENED,
    "(tl.sum(* | tl.sum(*)).to(tl.int64) -> *": _WIDENED,
    "(tag >> 32*.to(tl.int64) -> *": "the same number",
    "keep_late(state, late_ranks, tag, *": "the bits of both are put together",
    "row_of(state, owner, source, * -> row_of(state, source, owner, *": "where a peer reads it over the wire",
    "(is_whole & is_late(words, tag)).to(tl.int32) -> *": "Triton sums truth values as int32",
    "tl.sum((is_whole & *) -> tl.max(*": _MORE_THAN_0,
    "(is_late(words, tag) & (polls > 0)).to(tl.int32) -> *": "Triton sums truth values as int32",
    "tl.sum((is_late(words, tag) & *) -> tl.max(*": _MORE_THAN_0,
    "is_whole & is_late(*": "the first look: it polls once more than it must",
    "is_late(words, tag) -> is_late(tag, words)": _BOTH_LATE,
    "is_late(word, tag) -> is_late(tag, word)": _BOTH_LATE,
    "begin(* -> begin(*": _SUM,
    "end(* -> end(row, state, *": _SUM,
    "load_values(* -> load_values(at, *": _SUM,
    "tl.zeros_like(own).to(* -> tl.zeros_like(own)": _WIDENED,
    "pack(nothing, nothing, DTYPE) -> *": "both are the same",
    "dense_D.storage_offset() % 2 -> *": "copies more often than it must",
}

_PTX = "the interpreter does not run it; tests/fastpath/test_exchange.py looks at the PTX"
_ONE_THREAD = "the interpreter runs a program in one thread"

EXCHANGE_UNREACHED = {
    **UNREACHED,
    "(row // num_tokens).to(tl.int64) -> *": _FAR,
    "*inline_asm_elementwise(* -> *": _PTX,
    "mask.to(tl.int32) -> mask": _PTX,
    "state + _LATE -> *": _PTX,
    "tl.debug_barrier() -> nothing": _ONE_THREAD,
    "all_reduce_norm_row(*, AS_WORDS, INTERPRETED) -> *": "both are true in the interpreter",
    "tl.store(values_of(*, values, mask=mask) -> *": "zeros behind a row, which the next program writes over",
}

_TILES = "tiles of other sizes give the same"
_EITHER = "both kernels give the same, while all their programs are resident"
_BEYOND = "what is beyond writes to rank 0 again"

QK_EXCHANGE_EQUIVALENT = {
    **EXCHANGE_EQUIVALENT,
    "tl.atomic_xchg(at, words, mask=* -> tl.atomic_xchg(at, words, sem=*": _BEYOND,
    "store_words(place, * -> store_words(place, *, INTERPRETED, mask)": _BEYOND,
    "num_heads - first -> num_heads + first": "heads that are not there are masked where they are stored",
    "tiled_*, TILE, *_TILES, INTERLEAVED) -> tiled_*_TILES, TILE, INTERLEAVED)": _TILES,
    "_TILE_PAIRS // block_of(pairs) -> *": _TILES,
    "block_of(pairs) -> pairs": _TILES,
    "max(q_heads, k_heads) -> max(k_heads, q_heads)": "the larger of both is the same",
    "tiled_rope_pack(q_row, q_weight, * -> tiled_rope_pack(q_weight, q_row, *": "a product has no order",
    "tiled_rope_pack(k_row, k_weight, * -> tiled_rope_pack(k_weight, k_row, *": "a product has no order",
    "if 0 < num_rows <= _FEW_PER_SM * * -> if not 0 < *": _EITHER,
    "0 < num_rows <= _FEW_PER_SM * * -> *": _EITHER,
}
