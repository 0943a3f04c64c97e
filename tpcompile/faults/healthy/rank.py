"""One rank of one clean program under the sentinel; what happened goes to OUT/rank_N.json.

    python scripts/clean_programs.py --list
    torchrun --standalone --nproc-per-node 2 scripts/clean_programs.py --program one_region --out DIR
    torchrun --standalone --nproc-per-node 2 scripts/clean_programs.py --draw '{"program": ..., ...}' --out DIR

`clean_runs.py --what sentinel` draws the parameters, starts many of these, and judges.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.faults.healthy import EVERY
from tpcompile.faults.healthy.frame import Draw, Program, Run
from tpcompile.sentinel import Sentinel


def run_program(program: Program, draw: Draw, *, device_type: str, out: Path) -> dict[str, Any]:
    """The program under as many sentinels as were drawn, one after the other; what they saw on this rank."""
    tp = draw.nproc // program.dp
    mesh = init_device_mesh(device_type, (program.dp, tp), mesh_dim_names=("dp", "tp"))
    warnings: list[str] = []
    logger.enable("tpcompile")
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    found: dict[str, Any] = {
        "compiles": 0, "findings": [], "stopped_watching": False, "warnings": warnings, "stats": [], "domain": "",
    }  # fmt: skip
    run = Run(draw, mesh)
    run.prepared = program.prepare(run) if program.prepare else None
    for number in range(draw.sentinels):
        sentinel = Sentinel(mesh=mesh, axis="tp", run_dir=out / f"verdict_{number}", hang_after_s=draw.hang_after_s)
        with sentinel as run.sentinel:
            program.body(run)
            found["stopped_watching"] |= not sentinel.is_active
        found["compiles"] += sentinel.stats["compiles"]
        found["findings"] += [verdict.summary for verdict in sentinel.findings]
        found["stats"].append(dict(sentinel.stats))
        found["domain"] = sentinel.domain
    return found


def main() -> int:
    """Join the group, run, write what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names of all programs")
    parser.add_argument("--program", choices=sorted(EVERY), default="one_region", help="with default parameters")
    parser.add_argument("--draw", type=lambda text: Draw(**json.loads(text)), help="parameters, as JSON")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/clean"))
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:32} {program.says}" for name, program in EVERY.items()))
        return 0
    draw = args.draw or Draw(program=args.program, nproc=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank = dist.get_rank()
    try:
        found = run_program(EVERY[draw.program], draw, device_type=args.device, out=args.out)
        print(f"rank {rank}: {json.dumps(found['stats'])}", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"rank_{rank}.json").write_text(json.dumps(found))
    finally:
        torch.compiler.reset()  # NCCL does not let go of a group while CUDA graphs hold its collectives
        gc.collect()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
