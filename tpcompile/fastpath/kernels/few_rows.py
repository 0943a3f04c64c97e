"""A few rows -> their product with a weight, with bias and GELU (tanh), in one kernel that reads weights early.

So few rows take as long as their weights take to be read. The kernel has its first weights on their way into shared
memory before it waits for the kernel before it, whose output it multiplies (`griddepcontrol.wait`, which does nothing
after an ordinary launch). `tpcompile.torch_api.early_start` lets it start early in a captured CUDA graph: then the
kernel just before it must not write the weight. Every output is summed by one program in one order, so all ranks that
have equal inputs have equal bits. For inference: it has no backward.
"""

# I input features, O output features
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait

from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.op import is_interpreted
from tpcompile.fastpath.registry import TpSupport
from tpcompile.fastpath.tiles import COLS, DEPTH, DTYPES, MOST_ROWS, STAGES, are_few_rows


@gluon.jit
def few_rows_kernel(
    x, weight, bias, out, num_rows, num_out, WIDTH: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """A program has COLS rows of the weight, DEPTH elements of each at a time, in a ring of STAGES in shared memory."""
    dtype: gl.constexpr = weight.dtype.element_ty
    threads: gl.constexpr = DEPTH // 8  # of 16 bytes each, for one row
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [32 // threads, threads], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    weights = gl.allocate_shared_memory(dtype, [STAGES, COLS, DEPTH], shared)
    xs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], shared)
    first = gl.program_id(0) * COLS
    at = gl.arange(0, DEPTH, gl.SliceLayout(0, loaded))[None, :]
    weight_at = weight + (first + gl.arange(0, COLS, gl.SliceLayout(1, loaded)))[:, None] * WIDTH + at
    row = gl.arange(0, ROWS, gl.SliceLayout(1, loaded))[:, None]
    x_at = x + row * WIDTH + at
    is_row = (row < num_rows) & (at < WIDTH)
    for stage in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(
            weights.index(stage), weight_at + stage * DEPTH, eviction_policy="evict_first"
        )
        async_copy.commit_group()
    gdc_wait()
    for stage in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(xs.index(stage), x_at + stage * DEPTH, mask=is_row)
        async_copy.commit_group()
    total = gl.zeros([COLS, ROWS], gl.float32, summed)
    used = 0
    filled = STAGES - 1
    for step in range(WIDTH // DEPTH):
        async_copy.wait_group(STAGES - 2)
        hopper.fence_async_shared()
        tl.debug_barrier()
        ahead = step + STAGES - 1
        if ahead < WIDTH // DEPTH:
            async_copy.async_copy_global_to_shared(
                weights.index(filled), weight_at + ahead * DEPTH, eviction_policy="evict_first"
            )
            async_copy.async_copy_global_to_shared(xs.index(filled), x_at + ahead * DEPTH, mask=is_row)
        async_copy.commit_group()
        total = hopper.warpgroup_mma(weights.index(used), xs.index(used).permute((1, 0)), total, is_async=False)
        filled = used
        used = (used + 1) * (used != STAGES - 1).to(gl.int32)
    col = first + gl.arange(0, COLS, gl.SliceLayout(1, summed))[:, None]
    out_row = gl.arange(0, ROWS, gl.SliceLayout(0, summed))[None, :]
    if HAS_BIAS:
        total += gl.load(bias + col).to(gl.float32)
    if GELU:
        total = total / (1.0 + gl.exp(-1.5957691216057308 * (total + 0.044715 * total * total * total)))
    gl.store(out + out_row * num_out + col, total.to(dtype), mask=(out_row < num_rows) & (col < num_out))


@triton.jit
def few_rows_plain_kernel(
    x, weight, bias, out, num_rows, num_out, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """The same in plain Triton, for the interpreter and for a Triton with a different Gluon; it reads nothing early."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, width, DEPTH):
        at = start + tl.arange(0, DEPTH)
        a = tl.load(x + rows * width + at[None, :], mask=rows < num_rows, other=0.0).to(tl.float32)
        b = tl.load(weight + cols * width + at[:, None]).to(tl.float32)
        total += tl.dot(a, b, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + cols).to(tl.float32)
    if GELU:
        total = total / (1.0 + tl.exp(-1.5957691216057308 * (total + 0.044715 * total * total * total)))
    tl.store(out + rows * num_out + cols, total.to(out.dtype.element_ty), mask=rows < num_rows)


@custom_op("tpcompile::few_rows", mutates_args=())
def few_rows(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gelu: bool) -> Tensor:
    """[..., I], [O, I], [O] or None -> [..., O], contiguous; `gelu` of it, in the tanh form.

    Raises FastPathError for more than MOST_ROWS rows, and for types and shapes that it cannot take.
    """
    _check(x_I, weight_OI, bias_O)
    num_out, width = weight_OI.shape
    out_O = x_I.new_empty(*x_I.shape[:-1], num_out)
    rows_I = x_I.reshape(-1, width).contiguous()
    num_rows = rows_I.shape[0]
    bias = weight_OI if bias_O is None else bias_O
    options = {"COLS": COLS, "DEPTH": DEPTH, "HAS_BIAS": bias_O is not None, "GELU": gelu}
    grid = (num_out // COLS,)
    if num_rows == 0:
        return out_O
    arguments = (rows_I, weight_OI, bias, out_O, num_rows, num_out, width)
    if is_interpreted() or not _has_copies():
        few_rows_plain_kernel[grid](*arguments, ROWS=16, **options)
    else:
        few_rows_kernel[grid](*arguments, ROWS=MOST_ROWS, STAGES=STAGES, WARPS=4, num_warps=4, **options)
    return out_O


def _has_copies() -> bool:
    """True for a Triton whose Gluon has the copies that the kernel makes; 3.6 has, 3.9 has others in their place."""
    return not hasattr(async_copy, "async_load")


def _check(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    num_rows = x_I.shape[:-1].numel()
    num_out, width = weight_OI.shape
    tensors = [x_I, weight_OI] if bias_O is None else [x_I, weight_OI, bias_O]
    if {tensor.dtype for tensor in tensors} - {x_I.dtype} or not are_few_rows(num_rows, num_out, width, x_I.dtype):
        raise FastPathError(
            f"few_rows: {num_rows} rows of {x_I.dtype} times {num_out} x {width} of {weight_OI.dtype}; it takes at "
            f"most {MOST_ROWS} rows, bfloat16 or float16 throughout, multiples of {COLS} outputs and of {DEPTH} "
            f"inputs, and at least {STAGES * DEPTH} inputs"
        )
    if x_I.shape[-1] != width or (bias_O is not None and bias_O.shape != (num_out,)):
        found = "none" if bias_O is None else list(bias_O.shape)
        raise FastPathError(f"few_rows: x is {x_I.shape[-1]} wide, the weight {num_out} x {width}, the bias {found}")
    if not weight_OI.is_contiguous() or (x_I.data_ptr() | weight_OI.data_ptr()) % 16:
        raise FastPathError(
            "few_rows: the weight must be contiguous, and it and x at a multiple of 16 bytes; clone them"
        )


@few_rows.register_fake
def _(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gelu: bool) -> Tensor:
    return x_I.new_empty(*x_I.shape[:-1], weight_OI.shape[0])


@fast_path("few_rows_linear", replaces=plain.few_rows_linear, tp=TpSupport.PER_TOKEN, dtypes=DTYPES, min_sm=90)
def few_rows_linear(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, gelu: bool = False) -> Tensor:
    """As `plain.few_rows_linear`, for at most MOST_ROWS rows."""
    return few_rows(x_I, weight_OI, bias_O, gelu)


@fast_path("few_rows_linear_gelu", replaces=plain.linear_gelu_tanh, tp=TpSupport.PER_TOKEN, dtypes=DTYPES, min_sm=90)
def few_rows_linear_gelu(x_I: Tensor, weight_fI: Tensor, bias_f: Tensor) -> Tensor:
    """As `plain.linear_gelu_tanh`, for at most MOST_ROWS rows."""
    return few_rows(x_I, weight_fI, bias_f, True)
