"""What one divergent rank costs: seconds from its fault to the end of the job, with the sentinel and without it.

    python scripts/bench_divergence.py --nproc 8 [--preset wan14b_8] [--plain-limit-s 60] [--json FILE]

A stack of transformer blocks under tensor parallelism, compiled, is called step after step. At step 3 the last rank
begins to keep statistics: a guard fails, it recompiles alone, and its new graph sums the statistics over a separate
group. No other rank joins that collective. With the sentinel the job must end by itself, with a verdict; without it, it
hangs until the timeout of the process group (NCCL: 10 minutes), and is killed here after `--plain-limit-s`.

Exit 1 when the sentinel's job did not end by itself with the recompiling rank and its line named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile import config
from tpcompile.collectives import all_reduce
from tpcompile.collectives.strategies import Collectives
from tpcompile.evidence.rundir import RunDir
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.process_tree import run_tree
from tpcompile.sentinel import Sentinel

FAULT_STEP = 3


class Model(nn.Module):
    """The stack, and statistics that can be switched on."""

    def __init__(self, stack: nn.Module, statistics: dist.ProcessGroup) -> None:
        super().__init__()
        self.stack, self.statistics, self.keeps_statistics = stack, statistics, False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> [B, S, D], and the mean magnitude."""
        y_BSD = self.stack(*inputs)
        mean = y_BSD.abs().mean().float()
        if self.keeps_statistics:
            mean = all_reduce(mean, group=self.statistics)
        return y_BSD, mean


def play(preset: str, out: Path, *, backend: str, is_watched: bool) -> None:
    """One rank: compile, step, diverge on the last rank."""
    settings = config.load(preset)
    block = settings.block
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    dtype = getattr(torch, block.dtype)
    with torch.device("meta"):
        stack = TransformerStack(block, Collectives(dist.group.WORLD), num_layers=block.num_layers)
    stack = stack.to_empty(device=device)
    load_full_state_dict(stack, draw_stack_weights(block, seed=0, dtype=dtype, device=device))
    statistics = dist.new_group(group_desc="statistics")
    model = Model(stack, statistics)
    compiled = torch.compile(model, dynamic=False, backend=backend)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    inputs = draw_inputs(block, seed=1, device=device, dtype=dtype, seq_len=block.seq_len)
    with torch.no_grad(), Sentinel(run_dir=out / "run") if is_watched else nullcontext():
        for step in range(2 * FAULT_STEP):
            if step == FAULT_STEP and is_last:
                model.keeps_statistics = True
                (out / "fault").write_text(str(time.time()))
            _, mean = compiled(*inputs)
            mean.item()  # a loop that logs
    dist.destroy_process_group()


def measure(args: argparse.Namespace, out: Path, *, is_watched: bool, limit_s: float) -> dict[str, Any]:
    """One job under torchrun: seconds from the fault to its end, and the verdict."""
    out.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)]
    rank = [__file__, "--rank-of", str(out), "--preset", args.preset, "--backend", args.backend]
    rank += ["--watched"] if is_watched else []
    outcome = run_tree([sys.executable, *torchrun, *rank], environ=os.environ, timeout_s=limit_s, grace_s=3.0)
    ended, fault = time.time(), out / "fault"
    if not fault.exists():
        return {"error": f"the fault was not reached; exit code {outcome.exit_code}"}
    fault_at = float(fault.read_text())
    found: dict[str, Any] = {"ended_by_itself": not outcome.timed_out, "exit_code": outcome.exit_code}
    found["fault_to_end_s"] = round(ended - fault_at, 2)
    verdict = RunDir(out / "run").read_verdict() if is_watched else None
    if verdict is not None:
        found["fault_to_verdict_s"] = round((out / "run" / "verdict.json").stat().st_mtime - fault_at, 2)
        found["summary"] = verdict.summary
        found["findings"] = [
            {"cause": d.cause.value, "title": d.title, "line": f"{d.line} {d.line.code.strip()}" if d.line else None}
            for d in verdict.divergences
            if d.is_red
        ] + [
            {"cause": c.cause.value, "title": c.observed, "line": f"{c.line} {c.line.code.strip()}" if c.line else None}
            for c in verdict.checks
            if c.status == "fail"
        ]
    return found


def main() -> int:
    """Both jobs, and the ratio of their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--preset", default="cpu_smoke")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--plain-limit-s", type=float, default=60.0, help="seconds after which the hang is ended")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        play(args.preset, args.rank_of, backend=args.backend, is_watched=args.watched)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        watched = measure(args, Path(folder, "watched"), is_watched=True, limit_s=300.0)
        plain = measure(args, Path(folder, "plain"), is_watched=False, limit_s=args.plain_limit_s)
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    found = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores{device}",
        "torch": torch.__version__,
        "ranks": args.nproc,
        "sentinel": watched,
        "plain": plain,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    named = [f["line"] for f in watched.get("findings", ()) if f["line"] and Path(__file__).name in f["line"]]
    return 0 if watched.get("ended_by_itself") and watched["exit_code"] == 1 and named else 1


if __name__ == "__main__":
    sys.exit(main())
