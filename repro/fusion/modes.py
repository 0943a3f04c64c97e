"""Small programs in each mode of torch.compile: speed, compile cost, warm-up, cache; and four ways to lose the gain.

    python repro/fusion/modes.py --json FILE                         # all, on the GPU or CPU of this machine
    tpcompile verify-win repro.fusion.modes:feed_forward             # one of them

Each is a target of `tpcompile verify-win`, which measures and names the cause. A program that loses is followed by its
repair. CUDA graphs need a GPU, so on a CPU two of the four have nothing to lose.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.target import TargetContext

ROOT = Path(__file__).parents[2]


class Pointwise(nn.Module):
    """Thirty passes over memory in eager mode, one compiled."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = (x * 1.01 + 0.1).relu()
        return x


class FeedForward(nn.Module):
    """That of repro/fusion/walk_through.py: 32 tokens, the widths of Llama 3 8B."""

    def __init__(self, dim: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        shapes = [(dim,), (dim,), (hidden, dim), (hidden,), (hidden, dim), (hidden,), (dim, hidden), (dim,)]
        for number, shape in enumerate(shapes):
            weight = torch.randn(shape, device=device) / shape[-1] ** 0.5
            # Inference: the wrapper that keeps what a backward needs costs as much as a kernel.
            self.register_parameter(f"w{number}", nn.Parameter(weight, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        from repro.fusion import walk_through

        found: Tensor = walk_through.feed_forward(x, *self.parameters())
        return found


class Small(nn.Module):
    """Forty matmuls that each take a GPU less time than the host needs to launch it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(64) * 0.99)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = (x @ self.w).relu()
        return x


class Library(nn.Module):
    """Four matmuls, and nothing else that takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1024, 1024) / 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x @ self.w
        return x


class Broken(nn.Module):
    """Each op is a graph of its own, so nothing is fused."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.01
        print(end="", file=sys.stderr)  # breaks the graph
        x = x * 1.01
        print(end="", file=sys.stderr)
        x = x * 1.01
        print(end="", file=sys.stderr)
        return x * 1.01


class Unbroken(nn.Module):
    """The same without the print."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.01
        x = x * 1.01
        x = x * 1.01
        return x * 1.01


class Counting(nn.Module):
    """A Python number that is new at each call is guarded: each call recompiles, until torch gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls % 2 else x + self.calls


class CountingInTensor(nn.Module):
    """The same with the number in a tensor, which no guard looks into."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.where(self.calls % 2 == 1, x * 2, x + self.calls)


class Lengths(nn.Module):
    """Called with more rows at each call; `multiple` of 1 is a new length each time, and a new CUDA graph."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple, self.rows = multiple, 0

    def next_rows(self) -> int:
        """Rows of the next call, padded to a multiple."""
        self.rows += 1
        return -(-self.rows // self.multiple) * self.multiple

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = (x * 1.01 + 0.1).relu()
        return x


def _step(program: Any, inputs: Any) -> Tensor:
    rows = inputs[0][: program.next_rows()]
    torch._dynamo.mark_dynamic(rows, 0)
    found: Tensor = program(rows)
    return found


def _target(module: nn.Module, ctx: TargetContext, *shape: int, dtype: torch.dtype = torch.float32) -> tpcompile.Target:
    inputs = torch.rand(shape, device=ctx.device, dtype=dtype)
    return tpcompile.Target(program=module.to(ctx.device, dtype), inputs=(inputs,))


def _square(module: nn.Module, ctx: TargetContext) -> tpcompile.Target:
    """Of an input that is large enough that a GPU, too, is bound by memory."""
    return _target(module, ctx, *((8192, 8192) if ctx.device.type == "cuda" else (512, 1024)))


def pointwise(ctx: TargetContext) -> tpcompile.Target:
    """Wins in every mode."""
    return _square(Pointwise(), ctx)


def feed_forward(ctx: TargetContext) -> tpcompile.Target:
    """Bound by its weights; on a CPU a smaller one."""
    if ctx.device.type == "cuda":
        return _target(FeedForward(4096, 14336, ctx.device), ctx, 32, 4096, dtype=torch.bfloat16)
    return _target(FeedForward(256, 1024, ctx.device), ctx, 32, 256)


def small(ctx: TargetContext) -> tpcompile.Target:
    """Wins with CUDA graphs only."""
    return _target(Small(), ctx, 64, 64)


def library(ctx: TargetContext) -> tpcompile.Target:
    """Wins in no mode."""
    return _target(Library(), ctx, *((8192, 1024) if ctx.device.type == "cuda" else (512, 1024)))


def broken(ctx: TargetContext) -> tpcompile.Target:
    """A graph break behind each op."""
    return _square(Broken(), ctx)


def unbroken(ctx: TargetContext) -> tpcompile.Target:
    """The repair of `broken`."""
    return _square(Unbroken(), ctx)


def counting(ctx: TargetContext) -> tpcompile.Target:
    """Recompiles at each call."""
    return _square(Counting(), ctx)


def counting_in_tensor(ctx: TargetContext) -> tpcompile.Target:
    """The repair of `counting`."""
    return _square(CountingInTensor(), ctx)


def lengths(ctx: TargetContext) -> tpcompile.Target:
    """A new length at each call."""
    found = _target(Lengths(1), ctx, 512, 1024)
    return tpcompile.Target(program=found.program, inputs=found.inputs, step=_step)


def padded_lengths(ctx: TargetContext) -> tpcompile.Target:
    """The repair of `lengths`: all have one length."""
    found = _target(Lengths(512), ctx, 512, 1024)
    return tpcompile.Target(program=found.program, inputs=found.inputs, step=_step)


@dataclass(frozen=True)
class Case:
    """A target, and the modes in which it is measured; none are all of the device."""

    target: str
    modes: tuple[str, ...] = ()
    needs_gpu: bool = False


CASES = (
    Case("pointwise"),
    Case("feed_forward"),
    Case("library", ("default", "reduce-overhead")),
    Case("broken", ("default",)),
    Case("unbroken", ("default",)),
    Case("counting", ("default",)),
    Case("counting_in_tensor", ("default",)),
    Case("lengths", ("reduce-overhead",), needs_gpu=True),
    Case("padded_lengths", ("reduce-overhead",), needs_gpu=True),
    Case("small", ("default",), needs_gpu=True),
    Case("small", ("reduce-overhead",), needs_gpu=True),
)


def measured(case: Case) -> dict[str, Any]:
    """What `tpcompile verify-win --json` prints. Raises CalledProcessError where it could not measure."""
    modes = [argument for mode in case.modes for argument in ("--mode", mode)]
    more = [*modes, *(["--no-cached"] if case.modes else [])]
    command = [sys.executable, "-m", "tpcompile", "verify-win", f"repro.fusion.modes:{case.target}", *more, "--json"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode not in (0, 1):
        raise subprocess.CalledProcessError(ended.returncode, command)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def main() -> None:
    """Print the table of each program, and write what was measured."""
    from tpcompile.fusion.win.decide import lines
    from tpcompile.fusion.win.mode_records import Advice, Measured
    from tpcompile.report import console

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was measured")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose name has a match")
    arguments = parser.parse_args()
    out = arguments.json
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    command = (
        f"python repro/fusion/modes.py --json FILE {f'--only {arguments.only}' if arguments.only else ''}".rstrip()
    )
    rows: dict[str, Any] = {}
    for case in CASES:
        name = " ".join([case.target, *case.modes])
        if not re.search(arguments.only, name) or (case.needs_gpu and device == "cpu"):
            continue
        rows[name] = found = measured(case)
        print(name)
        modes = [Measured.model_validate(one) for one in found["modes"]]
        for line in lines(modes, Advice.model_validate(found["advice"])):
            console.stdout().print(line, soft_wrap=True)
        if out is not None:
            made_with = {"command": command, "torch": torch.__version__, "device": device}
            out.write_text(json.dumps({"made_with": made_with, "programs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
