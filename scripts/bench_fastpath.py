"""Every fast path that ships against Inductor's code for its plain code: the cells of tpcompile/fastpath/ratios.json.

    python scripts/bench_fastpath.py --json tpcompile/fastpath/ratios.json [--path NAME] [--tokens N ...] [--jobs N]

One GPU. The two programs are compiled separately (different code objects; the regions that a call enters are counted)
and captured in CUDA graphs. Rounds alternate between them; a cell is the median over rounds of the ratio of both times
in a round, with the quartiles of that ratio. On both sides a copy of the sums, which Inductor cannot fuse, stands for
the all-reduce, so its time is not included. Cells in which the fast path is slower are written as well; below a ratio
of 1.03 Inductor's code is chosen.
"""

import argparse
import inspect
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import tpcompile.fastpath.kernels.all  # noqa: F401  registers them
from tpcompile.fastpath import registered
from tpcompile.fastpath.measured import Ratio, ShapeClass, read_table, write_table
from tpcompile.private_folder import cache_folder
from tpcompile.recording import CaptureSession

TOKENS = {"": (8, 64, 256, 1024, 4680), "train": (256, 4680)}
ON_ONE_GPU = "qkv_pack_rmsnorm_rope"
"""Refused on shards: at tp 1 alone."""
WIDTHS = {
    "add_rms_norm": (4096, 5120),
    "add_modulated_norm": (4096, 5120),
    "gelu_tanh": (13824, 6912, 3456, 1728),
    "silu_mul": (14336, 7168, 3584, 1792),
    "linear_gelu_tanh": (13824, 6912, 3456, 1728),
}
"""Of wan14b and llama8b, the MLPs at tp 1, 2, 4 and 8."""
WITH_PRODUCT, DIM = "linear_gelu_tanh", 5120
"""From rows of so many features, those of wan14b."""
DTYPE = torch.bfloat16
ROUNDS = 15
ROUND_US = 2000.0
"""About how long one program runs in one round."""


@torch.library.custom_op("bench::summed", mutates_args=())
def summed(partial: Tensor) -> Tensor:
    """Stands for the all-reduce."""
    return partial.clone()


summed.register_fake(torch.empty_like)
summed.register_autograd(lambda ctx, grad: summed(grad))


@dataclass(frozen=True)
class Bench:
    """One cell."""

    path: str
    tokens: int
    tp: int | None
    """None for a path whose tensors do not depend on it."""
    heads: tuple[int, int] = (0, 0)
    """Of q and k on all ranks, of 128."""
    width: int = 0
    variant: str = ""

    @property
    def is_trained(self) -> bool:
        """True with a backward."""
        return "train" in self.variant

    def arguments(self) -> dict[str, Any]:
        """Arguments of the launcher and of the plain code."""
        rows, tokens = {"device": "cuda", "dtype": DTYPE}, self.tokens
        if self.path == WITH_PRODUCT:
            weight_fI = torch.randn(self.width, DIM, **rows) / DIM**0.5
            bias_f = torch.randn(self.width, **rows)
            return {"x_I": torch.randn(1, tokens, DIM, **rows), "weight_fI": weight_fI, "bias_f": bias_f}
        if self.width:
            names = _activations(self.path)
            parts = torch.randn(1, tokens, len(names) * self.width, **rows).chunk(len(names), -1)
            if self.path != "silu_mul":  # whose gate and up are halves of one projection
                parts = [part.contiguous() for part in parts]
            rest = {name: torch.randn(1, self.width, device="cuda") for name in _modulations(self.path)}
            rest |= {"weight_D": torch.ones(self.width, **rows), "eps": 1e-6}
            wanted = {name: value for name, value in rest.items() if name in _parameters(self.path)}
            return {**dict(zip(names, parts, strict=True)), **wanted}
        q_width, k_width = (heads * 128 // (self.tp or 1) for heads in self.heads)
        qkv = torch.randn(1, tokens, q_width + 2 * k_width, **rows)
        angles_SR = torch.randn(tokens, 64, device="cuda")
        per_head = self.path == "qk_head_norm_rope"
        weights = (torch.ones(128 if per_head else width, **rows) for width in (q_width, k_width))
        q, k, _ = qkv.split([q_width, k_width, k_width], -1)
        names = [name for name in _parameters(self.path) if name[-2:] in ("_E", "_d", "_c") and "weight" in name]
        shared = {"eps": 1e-6, "interleaved": "interleaved" in self.variant}
        if self.path == "qk_norm_rope":
            shared |= {"counts": tuple(heads * 128 for heads in self.heads), "all_reduce": _all_reduce(self.tp)}
        tables = {"cos_SR": angles_SR.cos(), "sin_SR": angles_SR.sin()}
        activations = {"qkv": qkv} if self.path == ON_ONE_GPU else {"q_BSd": q, "k_BSc": k}
        return {**activations, **dict(zip(names, weights, strict=True)), **tables, **shared}

    def shapes(self, arguments: dict[str, Any]) -> list[torch.Size]:
        """Shapes to pass to `Selection.decide`."""
        if self.path == ON_ONE_GPU:
            widths = (arguments[name].shape[0] for name in ("q_weight_d", "k_weight_c"))
            return [*(torch.Size((1, self.tokens, width)) for width in widths), arguments["cos_SR"].shape]
        if self.path == WITH_PRODUCT:
            return [torch.Size((1, self.tokens, width)) for width in (DIM, self.width)]
        names = ("q_BSd", "k_BSc", "cos_SR") if self.heads[0] else tuple(_activations(self.path))[:1]
        return [arguments[name].shape for name in names]


def cells(name: str) -> Iterator[Bench]:
    """All shapes of a fast path."""
    for train, lengths in TOKENS.items():
        if train and not registered()[name].autograd:
            continue
        for tokens in lengths:
            for width in WIDTHS.get(name, ()):
                yield Bench(name, tokens, None, width=width, variant=train)
            if name in WIDTHS:
                continue
            for tp in (1,) if name == ON_ONE_GPU else (1, 2, 4, 8):
                yield Bench(name, tokens, tp, (40, 40), variant=_joined("interleaved", train))
                if name == "qk_head_norm_rope":
                    yield Bench(name, tokens, tp, (32, 8), variant=train)
                else:
                    yield Bench(name, tokens, tp, (40, 40), variant=train)


def measure(cell: Bench) -> dict[str, Any]:
    """Time of both programs, and their ratio."""
    path = registered()[cell.path]
    arguments = cell.arguments()
    if cell.is_trained:
        arguments = {name: _leaf(value) for name, value in arguments.items()}
    programs = {
        "inductor": compiled(path.replaces, arguments, cell),
        "fast path": compiled(path.launcher, arguments, cell),
    }
    regions = {name: regions_per_call(call) for name, call in programs.items()}
    graphs = {name: captured(call) for name, call in programs.items()}
    once = max(time_us(graph, 1) for graph in graphs.values())
    replays = max(1, math.ceil(ROUND_US / once))
    rounds = []
    for index in range(ROUNDS):
        order = list(graphs) if index % 2 else list(reversed(graphs))
        rounds.append({name: time_us(graphs[name], replays) / CALLS for name in order})
    shape = ShapeClass.of(cell.shapes(arguments), DTYPE, tp=cell.tp or 1)
    ratios = [one["inductor"] / one["fast path"] for one in rounds]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return {
        "path": cell.path,
        "gpu": torch.cuda.get_device_name(),
        "dtype": shape.dtype,
        "tp": cell.tp,
        "tokens": cell.tokens,
        "widths": shape.widths,
        "variant": cell.variant,
        "ratio_to_inductor": round(median, 3),
        "quartiles": (round(lower, 3), round(upper, 3)),
        "us": {name: round(statistics.median(one[name] for one in rounds), 2) for name in graphs},
        "regions": regions,
    }


CALLS = 10
"""Calls in a CUDA graph."""


def compiled(function: Callable[..., Any], arguments: dict[str, Any], cell: Bench) -> Callable[[], Any]:
    """A call of the compiled program, with its backward when the cell has one."""

    def program(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    program.__code__ = program.__code__.replace(co_name=f"program_{id(arguments)}")  # a code object of its own
    fast = torch.compile(program, fullgraph=True, dynamic=False)
    leaves = [value for value in arguments.values() if isinstance(value, Tensor) and value.requires_grad]

    def call() -> Any:
        result = fast(arguments)
        outputs = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(outputs, leaves, [output.detach() for output in outputs]) if leaves else outputs

    return call


def regions_per_call(call: Callable[[], Any]) -> float:
    """Compiled regions that one warm call enters."""
    call()
    with CaptureSession() as session, session.phase("count"):
        call()
    return sum(count.entered for count in session.region_counts())


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Some calls in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def time_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Mean of some replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / replays


def main() -> int:
    """Compile in parallel, which fills Inductor's cache; then measure one by one and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="append", help="only this fast path; the cells of others stay")
    parser.add_argument("--tokens", type=int, nargs="+", help="only these numbers of tokens; its other cells go")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.path or [name for name, path in registered().items() if not path.exchanges]
    wanted = [cell for name in names for cell in cells(name) if cell.tokens in (args.tokens or [cell.tokens])]
    if args.warm is not None:
        for cell in wanted[args.warm :: args.jobs]:
            path, arguments = registered()[cell.path], cell.arguments()
            arguments = {name: _leaf(value) for name, value in arguments.items()} if cell.is_trained else arguments
            for function in (path.replaces, path.launcher):
                compiled(function, arguments, cell)()
        return 0
    children = [subprocess.Popen([sys.executable, *sys.argv, "--warm", str(index)]) for index in range(args.jobs)]
    failed = [child.wait() for child in children]
    if any(failed):
        return 1
    about = {
        "command": "python " + " ".join(sys.argv),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()},
    }
    found = [cell for cell in read_table(args.json) if _stays(cell, args.path)]
    for cell in wanted:
        torch._dynamo.reset()
        found.append(Ratio.model_validate(measure(cell) | about))
        print(row(found[-1]), flush=True)
        write_table(found, args.json)
    return 0


def _stays(cell: Ratio, paths: list[str] | None) -> bool:
    """True for a cell of a different GPU, of a fast path that is not measured now, or of two GPUs."""
    is_here = cell.gpu == torch.cuda.get_device_name() and not registered()[cell.path].exchanges
    is_wanted = paths is None or cell.path in paths
    return not (is_here and is_wanted)


def row(cell: Ratio) -> str:
    """One line of the table."""
    what = f"{cell.path:21} tp {cell.tp or 'any':3} {cell.tokens:6} x {cell.widths!s:18} {cell.variant:20}"
    return f"{what} {cell.us['inductor']:9.2f} us {cell.us['fast path']:9.2f} us  {cell.ratio_to_inductor:5.2f}"


def _parameters(path: str) -> list[str]:
    return list(inspect.signature(registered()[path].replaces).parameters)


def _activations(path: str) -> list[str]:
    return [name for name in _parameters(path) if name.startswith(("x_", "branch_")) or name in ("gate_f", "up_f")]


def _modulations(path: str) -> list[str]:
    return [name for name in _parameters(path) if name.endswith("_BD")]


def _all_reduce(tp: int | None) -> Callable[[Tensor], Tensor]:
    return summed if (tp or 1) > 1 else lambda partial: partial


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)


def _leaf(value: Any) -> Any:
    is_table = isinstance(value, Tensor) and value.shape[-1:] == (64,) and value.dim() == 2
    is_leaf = isinstance(value, Tensor) and value.is_floating_point() and not is_table
    return value.detach().requires_grad_() if is_leaf else value


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("bench_fastpath")))
    sys.exit(main())
