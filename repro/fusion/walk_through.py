"""What Inductor makes of small programs, and three ways to lose it: tables with the numbers of this machine's torch.

    python repro/fusion/walk_through.py                # for an H100, on a machine without a GPU; nothing runs
    python repro/fusion/walk_through.py --gpu          # on a GPU, with times
    python repro/fusion/walk_through.py --cpu          # C++ code, without max-autotune

Three numbers of kernels: one for each op of the lowered graph, as eager code would have; what is left when ops were
computed where they are read; and what is launched. Without a GPU, matmuls of `max-autotune` have one Triton
configuration, which shows what may be fused; on a GPU it is decided by timing. `--json` prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
MODES = ("default", "max-autotune")
_AUTOTUNED = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "test_configs.max_mm_configs": 1}
_ROUNDS, _CALLS = 15, 20


@dataclass(frozen=True)
class Program:
    """A function of tensors of these shapes, and the mode it is compiled in."""

    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    dtype: str = "float32"
    mode: str = "default"
    more: Sequence[tuple[int, ...]] = ()
    """Shapes of index tensors."""
    options: dict[str, Any] = field(default_factory=dict)


def programs(machine: Machine) -> dict[str, Program]:
    """The three introductions, the feed-forward in each form, and a row of the table for each rule and mode."""
    import torch.nn.functional as F

    square = [(1024, 1024)] * 3
    found = {
        "pointwise: sigmoid(x * y + z)": Program(lambda x, y, z: (x * y + z).sigmoid(), square),
        "reduction: (x * y + z).sum(-1)": Program(lambda x, y, z: (x * y + z).sum(-1), [(4096, 512)] * 3),
        "horizontal: x.sin(), x.cos()": Program(lambda x: (x.sin(), x.cos()), square[:1]),
    }
    for mode in MODES:
        found[f"feed-forward, {mode}"] = Program(feed_forward, FEED_FORWARD, "bfloat16", mode)
    if machine.has_gpu:  # without one, torch cannot see which arguments a Triton kernel of the user writes
        from repro.fusion import hand_fused

        found["feed-forward, by hand"] = Program(hand_fused.feed_forward, FEED_FORWARD, "bfloat16")
    mm = [(1024, 1024)] * 2
    rules: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]] = {
        "pointwise and pointwise": (lambda x, y: (x + y).relu() * 2, mm, ()),
        "pointwise and reduction": (lambda x: (x * x).mean(-1), mm[:1], ()),
        "reduction and pointwise (norm)": (lambda x, w: F.rms_norm(x, (1024,), w), [(1024, 1024), (1024,)], ()),
        "residual and norm": (lambda x, y: F.rms_norm(x + y, (1024,)), mm, ()),
        "two reductions of one input": (lambda x: (x.sum(-1), x.amax(-1)), mm[:1], ()),
        "softmax": (lambda x: F.softmax(x, -1), mm[:1], ()),
        "embedding and add": (lambda w, x, i: F.embedding(i, w) + x, [(1024, 1024), (1024, 1024)], [(1024,)]),
        "casts": (lambda x: ((x.float() * 2).half() + 1).float(), mm[:1], ()),
        "matmul and relu": (lambda x, w: (x @ w).relu(), mm, ()),
        "matmul and silu": (lambda x, w: F.silu(x @ w), mm, ()),
        "pointwise and matmul": (lambda x, w: x.relu() @ w, mm, ()),
        "norm and matmul": (lambda x, w: F.rms_norm(x, (1024,)) @ w, mm, ()),
        "matmul and matmul": (lambda x, w: (x @ w) @ w, mm, ()),
        "transpose and pointwise": (lambda x, y: x.t().contiguous() + y, mm, ()),
    }
    for rule, (function, shapes, more) in rules.items():
        for mode in MODES:
            found[f"{rule}, {mode}"] = Program(function, shapes, "bfloat16", mode, more=more)
    return found


# T tokens, D model dim, H hidden dim
T, D, H = 32, 4096, 14336
FEED_FORWARD = [(T, D), (D,), (D,), (H, D), (H,), (H, D), (H,), (D, H), (D,)]


def feed_forward(x: Any, *weights: Any) -> Any:
    """layer norm, gate and up with biases, silu(gate) * up, down: 6 kernels in eager mode."""
    import torch.nn.functional as F

    scale, shift, gate, gate_bias, up, up_bias, down, down_bias = weights
    y = F.layer_norm(x, scale.shape, scale, shift)
    return F.linear(F.silu(F.linear(y, gate, gate_bias)) * F.linear(y, up, up_bias), down, down_bias)


# Three ways to lose it: the slower program, and its repair


def _printing(x: Any, w: Any) -> Any:
    y = (x * 2).relu()
    print(end="")  # breaks the graph
    return y * w + 1


def _silent(x: Any, w: Any) -> Any:
    return (x * 2).relu() * w + 1


def _over_rows(x: Any, w: Any) -> Any:
    return (x / x.sum(-1, keepdim=True)) * w


def _over_columns(x: Any, w: Any) -> Any:
    return (x / x.sum(0, keepdim=True)) * w


def failures(machine: Machine) -> dict[str, tuple[Program, Program]]:
    """What is lost -> the program as it should be, and as it is."""
    square = [(1024, 1024)] * 2
    half = Program(_silent, square, "bfloat16")
    in_half = {"triton.codegen_upcast_to_fp32": False}
    found = {
        "a graph break": (Program(_silent, square), Program(_printing, square)),
        "a reduction that does not follow the memory": (Program(_over_rows, square), Program(_over_columns, square)),
    }
    if machine.device.type == "cuda":
        found["a setting of the code generator"] = (half, replace(half, options=in_half))
    return found


class Machine:
    """Compiles for one device; `arch` is that of a GPU that is not here."""

    def __init__(self, arch: str, device: str) -> None:
        if arch:
            from tpcompile.fusion import no_gpu

            no_gpu.pretend(arch)  # before torch is imported
        import torch

        self.torch, self.has_gpu, self.arch = torch, device == "cuda" and not arch, arch
        self.device = torch.device(device)
        if self.has_gpu:  # graphs are compiled anew; kernels that autotuning has compiled are not
            self._cache = TemporaryDirectory()
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = self._cache.name
            torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
        else:
            torch.compiler.config.force_disable_caches = True

    def inputs(self, program: Program) -> list[Any]:
        torch = self.torch
        dtype = getattr(torch, program.dtype)
        tensors = [torch.randn(shape, device=self.device, dtype=dtype) / shape[-1] ** 0.5 for shape in program.shapes]
        indices = [torch.zeros(shape, device=self.device, dtype=torch.int64) for shape in program.more]
        return [*tensors, *indices]

    def recorded(self, program: Program) -> tuple[Any, Callable[[], Any]]:
        """The manifest, and a call of the compiled program."""
        from contextlib import nullcontext

        from tpcompile.fusion.recorder import FusionRecorder
        from tpcompile.torch_api import no_gpu
        from tpcompile.torch_api.generated import generating_backend

        torch = self.torch
        torch.compiler.reset()
        is_tuned = program.mode != "default"
        mode = "max-autotune-no-cudagraphs" if is_tuned and self.has_gpu else None
        backend = generating_backend() if self.arch else "inductor"
        building = no_gpu.empty_tensors() if self.arch else nullcontext()
        settings = program.options | (_AUTOTUNED if is_tuned and not mode else {})
        with torch._inductor.config.patch(settings), building, torch.no_grad(), FusionRecorder() as recorder:
            inputs = self.inputs(program)
            compiled = torch.compile(program.function, backend=backend, mode=mode)
            compiled(*inputs)
        return recorder.manifest(), lambda: compiled(*inputs)


def row(manifest: Any) -> dict[str, Any]:
    """Kernels and bytes of all graphs, and what is launched."""
    from tpcompile.fusion.launched import says
    from tpcompile.fusion.manifest import total, total_before
    from tpcompile.fusion.manifest_records import Role

    graphs = manifest.graphs
    for graph in graphs:
        assert graph.is_aligned, graph.why_not_aligned
    ops = [graph.decisions.ops for graph in graphs]
    before = [total_before(graph.decisions) for graph in graphs]
    after = [total(graph.launches) for graph in graphs]
    return {
        "ops": sum(one.kernels for one in ops),
        "nodes": sum(one.kernels for one in before),
        "launches": sum(one.kernels for one in after),
        "bytes of ops": sum(one.bytes for one in ops),
        "bytes": sum(one.bytes for one in after),
        "graphs": len(graphs),
        "kinds": [says(launch) for graph in graphs for launch in graph.launches if launch.role is not Role.WAIT],
    }


def walked(machine: Machine, wanted: str) -> dict[str, Any]:
    """A row for each program whose name matches."""
    rows = {}
    for name, program in programs(machine).items():
        can_run = machine.device.type == "cuda" or program.mode == "default"
        if can_run and re.search(wanted, name):
            manifest, call = machine.recorded(program)
            rows[name] = row(manifest)
            if machine.has_gpu:
                rows[name] |= timed(machine, program, call)
    return rows


def timed(machine: Machine, program: Program, call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of a call, median of rounds that alternate with eager code."""
    inputs = machine.inputs(program)
    sides: dict[str, Callable[[], Any]] = {"eager us": lambda: program.function(*inputs), "compiled us": call}
    found: dict[str, list[float]] = {name: [] for name in sides}
    with machine.torch.no_grad():
        for number in range(_ROUNDS + 3):
            for name, side in sides.items():
                us = _one_round(machine.torch, side)
                if number >= 3:
                    found[name].append(us)
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def _one_round(torch: Any, call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / _CALLS


def lost(machine: Machine) -> dict[str, Any]:
    """What `tpcompile fusion diff` says of each failure, and of its repair."""
    from tpcompile.fusion.diff import diff
    from tpcompile.fusion.why_not import missed_fusions

    rows = {}
    for name, (good, bad) in failures(machine).items():
        base, worse, repaired = (machine.recorded(one)[0] for one in (good, bad, good))
        missed = [one for graph in worse.graphs for one in missed_fusions(graph)]
        rows[name] = {
            "class": str(diff(base, worse).change),
            "launches": [row(base)["launches"], row(worse)["launches"]],
            "why": missed[0].reason.says if missed else "",
            "repaired": str(diff(base, repaired).change),
        }
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--gpu", action="store_true", help="on a GPU of this machine, with times")
    place.add_argument("--cpu", action="store_true", help="C++ code")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose name has a match")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    arch = "" if arguments.gpu or arguments.cpu else "sm_90"
    machine = Machine(arch, "cpu" if arguments.cpu else "cuda")
    rows = walked(machine, arguments.only)
    failed = {} if arguments.only else lost(machine)
    if arguments.json:
        gpu = machine.torch.cuda.get_device_name() if machine.has_gpu else arch or "cpu"
        command = " ".join(["python", "repro/fusion/walk_through.py", *sys.argv[1:]])
        made_with = {"command": command, "torch": machine.torch.__version__, "device": gpu}
        print(json.dumps({"made_with": made_with, "programs": rows, "failures": failed}, indent=1))
        return
    for name, found in rows.items():
        us = f" {found['eager us']:8.1f} {found['compiled us']:8.1f} us" if "compiled us" in found else ""
        moved = f"{found['bytes of ops'] / 1e6:7.1f} -> {found['bytes'] / 1e6:6.1f} MB"
        print(f"{name:48} {found['ops']} -> {found['nodes']} -> {found['launches']}  {moved}{us}")
        print(f"{'':8}{'; '.join(found['kinds'])}")
    for name, found in failed.items():
        first, then = found["launches"]
        print(f"{name:48} {first} -> {then} launches: {found['class']}; repaired: {found['repaired']}")
        print(f"{'':8}{found['why']}")


if __name__ == "__main__":
    main()
