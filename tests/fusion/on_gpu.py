"""The zoo on one GPU: the launches of each manifest beside the kernels that the profiler saw.

python -m tests.fusion.on_gpu OUT.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.fusion.zoo import COLLECTIVES, ON_GPU, ZOO, Program
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.fusion.records import Manifest, Role

NO_KERNELS = ("Memcpy", "Memset")
IN_EAGER = (Role.WRAPPER, Role.COPY)


def main(out: Path) -> None:
    """Write a row for each program after it has run."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    rows: dict[str, Any] = {}
    for name, program in {**ZOO, **ON_GPU, **COLLECTIVES}.items():
        try:
            rows[name] = row(program)
        except Exception as error:  # the next program runs
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        out.write_text(json.dumps({"machine": machine(), "programs": rows}, indent=1) + "\n")
        print(name, rows[name], flush=True)


def machine() -> dict[str, str]:
    return {
        "command": "python -m tests.fusion.on_gpu OUT.json",
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }


def row(program: Program) -> dict[str, Any]:
    torch.compiler.reset()
    with FusionRecorder() as recorder:
        step = program.step("cuda")
        step()
    manifest = recorder.manifest()
    step()
    launched = profiled(step)
    kernels = Counter(one.name for one in launches(manifest) if one.role is Role.KERNEL)
    own = {name: launched[name] for name in launched if name in kernels or name.startswith("triton_")}
    return {
        "why not aligned": [graph.why_not_aligned for graph in manifest.graphs if not graph.is_aligned],
        "not seen": sorted({name for graph in manifest.graphs if graph.decisions for name in graph.decisions.unseen}),
        "kernels": dict(kernels),
        "kernels launched": own,
        "library calls": sum(one.role is Role.EXTERN for one in launches(manifest)),
        "by the wrapper": sum(one.role in IN_EAGER for one in launches(manifest)),
        "other kernels launched": {name[:60]: number for name, number in launched.items() if name not in own},
    }


def launches(manifest: Manifest) -> list[Any]:
    return [launch for graph in manifest.graphs for launch in graph.launches]


def profiled(step: Any) -> Counter[str]:
    """Names of the kernels that one step launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    return Counter(event.name for event in on_gpu if not event.name.startswith(NO_KERNELS))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
