"""`python -m tests.fastpath.wrong_kernels`: named faults in the shipped kernels, each with a case that shows it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is declared

import torch

from tests.fastpath.shipped import HEADS
from tpcompile.fastpath import registered
from tpcompile.fastpath.certificate import MAX_RATIO
from tpcompile.fastpath.certify import proof
from tpcompile.fastpath.certify.mutate import ArgumentMutation, Mutation, SourceMutation
from tpcompile.fastpath.certify.shard_errors import Prepared, Setting, prepared
from tpcompile.fastpath.certify.trials import trial_of
from tpcompile.ranks.children import in_children

FIRST, GROUPED, _, STRIDED, *_ = (heads.name for heads in HEADS)
FAR = "rows 2^30 elements apart"
TOKENS = "2 x 5 tokens"


@dataclass(frozen=True)
class Fault:
    """One fault in one fast path, and the case that is to catch it."""

    name: str
    path: str
    case: str
    """Start of its name."""
    function: str = ""
    before: str = ""
    after: str = ""
    argument: ArgumentMutation | None = None
    tp: int = 2
    dtype: torch.dtype = torch.float32

    def mutation(self) -> Mutation:
        if self.argument is not None:
            return self.argument
        (function,) = (each for each in registered()[self.path].source.functions if each.__name__ == self.function)
        text = textwrap.dedent(inspect.getsource(function))
        assert text.count(self.before) >= 1, (self, text)
        tree = ast.parse(text.replace(self.before, self.after)).body[0]
        assert isinstance(tree, ast.FunctionDef)
        tree.decorator_list = []
        return SourceMutation(function, tree, 0, self.name)


def next_slice(name: str) -> ArgumentMutation:
    return ArgumentMutation(name, "the slice of the next rank")


ONE_REPLICA = ArgumentMutation("counts", "a replica of k counted twice", lambda counts: (counts[0], counts[1] // 2))
QK, HEAD, PACK = "qk_norm_rope", "qk_head_norm_rope", "qkv_pack_rmsnorm_rope"
ADD, ADALN = "add_rms_norm", "add_modulated_norm"
LINEAR, BIASED = "linear_gelu_tanh", f"{TOKENS}, biases from -4"
TANH, ERF = 'approximate="tanh"', 'approximate="none"'
EPS, CAST = " + tl.cast(eps, tl.float32))", ".to(tl.float32)"
OUTSIDE = ") + tl.cast(eps, tl.float32)"
INT64 = "tl.program_id(0).to(tl.int64)"
BF16 = torch.bfloat16
SECOND = "b = tl.load(row + at + PAIRS_PER_HEAD"
NEIGHBOUR = "b = tl.load(row + at + 1"
FAULTS = [
    Fault(
        "statistics over the shard",
        QK,
        FIRST,
        "qk_norm_rope",
        "all_reduce(qk_sums(q_BSd, k_BSc))",
        "qk_sums(q_BSd, k_BSc)",
    ),
    Fault(
        "statistics over the shard",
        PACK,
        FIRST,
        "norm_rope_pack",
        "tl.sum(a * a + b * b) / (num_heads",
        "tl.sum(a * a + b * b) / (2 * num_heads",
        tp=1,
    ),
    Fault("statistics over all heads", HEAD, FIRST, "head_norm_rope_pack", ", axis=1) /", ") /"),
    Fault("eps outside of the root", QK, FIRST, "qk_apply_kernel", EPS, OUTSIDE),
    Fault("eps outside of the root", PACK, FIRST, "norm_rope_pack", EPS, OUTSIDE, tp=1),
    Fault("eps outside of the root", HEAD, FIRST, "head_norm_rope_pack", EPS + "[:, None]", ")[:, None]" + OUTSIDE[1:]),
    Fault("eps outside of the root", ADD, TOKENS, "add_norm_kernel", EPS, OUTSIDE),
    Fault("eps outside of the root", ADALN, TOKENS, "modulated_norm_kernel", EPS, OUTSIDE),
    Fault("weight of the next rank", QK, FIRST, argument=next_slice("q_weight_d")),
    Fault("pairs of neighbours", QK, FIRST, "load_heads", SECOND, NEIGHBOUR),
    Fault("pairs of neighbours", HEAD, FIRST, "load_heads", SECOND, NEIGHBOUR),
    Fault("pairs of neighbours", PACK, FIRST, "load_heads", SECOND, NEIGHBOUR, tp=1),
    Fault("mask off by one", QK, STRIDED, "sum_of_squares", "at < width", "at <= width"),
    Fault("mask off by one", HEAD, STRIDED, "head_offsets", "elements < size", "elements <= size"),
    Fault("mask off by one", PACK, STRIDED, "head_offsets", "heads < num_heads", "heads <= num_heads", tp=1),
    Fault("mask off by one", ADD, TOKENS, "add_norm_kernel", "at < width", "at <= width"),
    Fault("mask off by one", ADALN, TOKENS, "modulated_norm_kernel", "at < width", "at <= width"),
    Fault("mask off by one", "gelu_tanh", TOKENS, "gelu_kernel", "at < width", "at <= width"),
    Fault("mask off by one", "silu_mul", TOKENS, "silu_mul_kernel", "at < width", "at <= width"),
    Fault("dropped cast", QK, FIRST, "sum_of_squares", CAST, "", dtype=BF16),
    Fault("dropped cast", HEAD, FIRST, "load_heads", CAST, "", dtype=BF16),
    Fault("dropped cast", PACK, FIRST, "load_heads", CAST, "", dtype=BF16, tp=1),
    Fault("dropped cast", ADD, TOKENS, "add_norm_kernel", CAST, "", dtype=BF16),
    Fault("dropped cast", "gelu_tanh", TOKENS, "gelu_kernel", CAST, "", dtype=BF16),
    Fault("dropped cast", "silu_mul", TOKENS, "silu_mul_kernel", CAST, "", dtype=BF16),
    Fault("missing tail", QK, FIRST, "qk_sums", "Q_BLOCK=block_of(q_width)", "Q_BLOCK=block_of(q_width) // 2"),
    Fault("missing tail", HEAD, FIRST, "qk_head_norm", "Q_HEADS=block_of(q_heads)", "Q_HEADS=block_of(q_heads) // 2"),
    Fault("missing tail", PACK, FIRST, "qkv_pack", "Q_HEADS=block_of(q_heads)", "Q_HEADS=block_of(q_heads) // 2", tp=1),
    Fault("missing tail", ADD, TOKENS, "add_norm", "BLOCK=block_of(width)", "BLOCK=block_of(width) // 2"),
    Fault("missing tail", ADALN, TOKENS, "modulated_norm", "BLOCK=block_of(width)", "BLOCK=block_of(width) // 2"),
    Fault("missing tail", "gelu_tanh", TOKENS, "gelu", "triton.cdiv(width, block)", "max(width // block, 1)"),
    Fault("missing tail", "silu_mul", TOKENS, "silu_mul_op", "triton.cdiv(width, block)", "max(width // block, 1)"),
    Fault("wrong stride", QK, STRIDED, "qk_sums", "*q_BSd.stride()[:2]", "*q_BSd.contiguous().stride()[:2]"),
    Fault("wrong stride", HEAD, STRIDED, "qk_head_norm", "*k_BSc.stride()[:2]", "*k_BSc.contiguous().stride()[:2]"),
    Fault("wrong stride", PACK, STRIDED, "qkv_pack", "*q_BSd.stride()[:2]", "*q_BSd.contiguous().stride()[:2]", tp=1),
    Fault("wrong stride", ADD, TOKENS, "add_norm", "x_D.contiguous(), branch_D.contiguous()", "x_D, branch_D"),
    Fault("wrong stride", ADALN, TOKENS, "modulated_norm", "gate_BD.stride(0), shift", "gate_BD.shape[1], shift"),
    Fault("wrong stride", "silu_mul", TOKENS, "silu_mul_op", "ups_f.stride(0), BLOCK", "width, BLOCK"),
    Fault("2^31 elements in 32 bits", QK, FAR, "qk_apply_kernel", INT64, "tl.program_id(0)", tp=1),
    Fault("2^31 elements in 32 bits", HEAD, FAR, "qk_head_norm_kernel", INT64, "tl.program_id(0)", tp=1),
    Fault("2^31 elements in 32 bits", PACK, FAR, "qkv_pack_kernel", INT64, "tl.program_id(0)", tp=1),
    Fault("weight of the next rank", LINEAR, BIASED, argument=next_slice("weight_fI")),
    Fault("GELU with erf", LINEAR, BIASED, "gelu_of_product", TANH, ERF),
    Fault("GELU with erf", LINEAR, f"{TOKENS}, biases from -3.2", "gelu_of_product", TANH, ERF, dtype=BF16),
    Fault("the form of a CPU", LINEAR, BIASED, "gelu_of_product", "x_NI.is_cuda", "True"),
    Fault("a replica of k counted twice", QK, GROUPED, argument=ONE_REPLICA, tp=4),
]


def case_of(fault: Fault) -> Prepared:
    path = registered()[fault.path]
    (case, *_) = (each for each in trial_of(fault.path).cases(fault.tp) if each.name.startswith(fault.case))
    (known,) = prepared(path, [(case, Setting(fault.tp, fault.dtype, torch.device("cpu")))])
    return known


def passes(fault: Fault, known: Prepared, mutation: Mutation | None, folder: str) -> bool:
    path, tried = registered()[fault.path], trial_of(fault.path)
    if isinstance(mutation, SourceMutation):
        mutation.apply(folder)
    elif mutation is not None:
        tried = proof._spoiled(tried, mutation)
    return all(result.worst.ratio <= MAX_RATIO for result in proof._results(path, tried, [known]))


def report(faults: Sequence[Fault], cpu_s: float = 20.0) -> None:
    """Print which kernels pass the cases of the faults, right and wrong, as JSON."""
    for path in {fault.path for fault in faults}:
        proof._prepare(registered()[path])
    known = {(fault.path, fault.case, fault.tp, fault.dtype): fault for fault in faults}
    cases = {key: case_of(fault) for key, fault in known.items()}
    with tempfile.TemporaryDirectory() as folder:

        def right() -> dict[str, bool]:
            return {" ".join(map(str, key)): passes(fault, cases[key], None, folder) for key, fault in known.items()}

        wrong = []
        for fault in faults:
            case = cases[fault.path, fault.case, fault.tp, fault.dtype]
            wrong.append(partial(passes, fault, case, fault.mutation(), folder))
        controls, *ended = in_children([right, *wrong], jobs=2, cpu_s=cpu_s)
    labels = [f"{fault.name}, {fault.path}, {fault.case}" for fault in faults]
    found = dict(zip(labels, [one.failure or one.result for one in ended], strict=True))
    passed = controls.result or {"failure": controls.failure}
    print(json.dumps({"right": passed, "wrong": found, "CPU s": sum(os.times()[:4])}))


if __name__ == "__main__":
    report(FAULTS)
