"""The zoo and the block on one GPU: the launches of each manifest beside the kernels that the profiler saw.

python -m tests.fusion.on_gpu OUT.json [blocks]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.fusion.zoo import COLLECTIVES, ON_GPU, ZOO, Program
from tpcompile import config
from tpcompile.collectives.strategies import Collectives
from tpcompile.fusion.manifest_records import Manifest, Role
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.torch_api.profiler import is_kernel, on_gpu

IN_EAGER = (Role.WRAPPER, Role.COPY)


@dataclass(frozen=True)
class Block:
    """One layer of a preset, whole on one rank, with the collectives of mode C."""

    preset: str
    is_trained: bool

    def step(self, device: str) -> Callable[[], None]:
        """Each call is a forward, and where it is trained a backward; the first compiles."""
        block = config.load(self.preset, ["block.num_layers=1"]).block
        place, dtype = torch.device(device), getattr(torch, block.dtype)
        weights = draw_stack_weights(block, seed=0, dtype=dtype, device=place)
        x, *rest = draw_inputs(block, seed=1, device=place, dtype=dtype, seq_len=block.seq_len)
        with torch.device("meta"):
            stack = TransformerStack(block, Collectives(dist.group.WORLD), num_layers=1)
        stack = stack.to_empty(device=place)
        load_full_state_dict(stack, weights)
        compiled = torch.compile(stack)

        def run() -> None:
            with torch.set_grad_enabled(self.is_trained):
                y = compiled(x.detach().requires_grad_(self.is_trained), *rest)
                if self.is_trained:
                    y.sum().backward()
                    stack.zero_grad(set_to_none=True)

        return run


BLOCKS = {
    f"{preset} {'step' if is_trained else 'forward'}": Block(preset, is_trained)
    for preset in ("llama8b", "wan14b_8")
    for is_trained in (False, True)
}


def main(out: Path, *, only_blocks: bool) -> None:
    """Write a row for each program after it has run."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    rows: dict[str, Any] = {}
    programs: dict[str, Program | Block] = {} if only_blocks else {**ZOO, **ON_GPU, **COLLECTIVES}
    for name, program in (programs | BLOCKS).items():
        try:
            rows[name] = row(program)
        except Exception as error:  # the next program runs
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        out.write_text(json.dumps({"machine": machine(), "programs": rows}, indent=1) + "\n")
        print(name, rows[name], flush=True)


def machine() -> dict[str, str]:
    return {
        "command": " ".join(["python -m tests.fusion.on_gpu", *sys.argv[1:]]),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
    }


def row(program: Program | Block) -> dict[str, Any]:
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
    return Counter(event.name for event in on_gpu(profiler.events()) if is_kernel(event.name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), only_blocks="blocks" in sys.argv[2:])
