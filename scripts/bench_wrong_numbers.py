"""Cost of the search for wrong numbers: a transformers Llama under a plan of DTensor on 2 gloo ranks, by its depth.

    python scripts/bench_wrong_numbers.py --layers 4 8 16 --json results/wrong_numbers_cpu.json

Each depth runs in processes of its own. The check is one eager train step (forward and backward) of the program and two
of its reference, in float32 and float64; the search is what follows where it is red. CPU seconds are those of rank 0,
all threads; memory is the peak of rank 0 in MiB, ahead of the search and after it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpcompile.numerics.wrong_op import Run, wrong_op_of

RANKS = 2
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def llama(num_layers: int, hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=num_layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=2048, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def parallel(model: Any, mesh: Any) -> Any:
    """The plan on every layer; the last `down_proj` is wrong, as a checkpoint of a different scale is."""
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(1.5)
    return model


def step(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids).logits
    loss = logits.double().square().mean()
    loss.backward()
    return {"loss": loss.detach(), "logits": logits.detach()}


def measured(call: Callable[[], object]) -> dict[str, float]:
    start, wall = time.process_time(), time.perf_counter()
    call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "cpu_s": round(time.process_time() - start, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "peak_mib": round(peak),
    }


def worker(rank: int, args: argparse.Namespace, num_layers: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/store")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    reference = llama(num_layers, args.hidden)
    exactly = copy.deepcopy(reference).double()
    program = parallel(llama(num_layers, args.hidden), mesh["tp"])
    ids = torch.arange(args.tokens).view(1, -1) * 7 % 2048
    runs = [Run(lambda m=module: step(m, ids), module) for module in (program, reference, exactly)]
    found: list[Any] = []

    def search() -> None:
        own, *alone = runs
        group, device = mesh.get_group(), torch.device("cpu")
        found.append(wrong_op_of(own, alone, ["loss", "logits"], group, dtype=torch.float32, device=device))

    check = measured(lambda: [run.call() for run in runs])
    searched = measured(search)
    if rank == 0:
        row = {"layers": num_layers, "check": check, "search": searched, "found": found[0] and found[0].about}
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def at_depth(args: argparse.Namespace, num_layers: int) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(args, num_layers, folder), nprocs=RANKS)
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text())
    row["times_check"] = round(row["search"]["cpu_s"] / row["check"]["cpu_s"], 2)
    print(json.dumps(row))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [at_depth(args, num_layers) for num_layers in args.layers]
    if args.json:
        about = {
            "command": f"python {' '.join(sys.argv)}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        }
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
