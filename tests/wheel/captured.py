"""A user's program under torchrun: captured, and checked on every rank. `--rank-constant` makes the ranks differ."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpcompile


def main() -> None:
    """Compile a function on two gloo ranks and compare them; exits as the verdict says."""
    scale = dist.get_rank() + 1 if "--rank-constant" in sys.argv else 2
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    program = torch.compile(lambda x: torch.relu(x) * scale)
    with tpcompile.capture(mesh) as run:
        program(torch.ones(4))
    verdict = tpcompile.check(run)
    if dist.get_rank() == 0:
        verdict.print()
        print(tpcompile.__file__)
    dist.barrier()  # torchrun ends the others as soon as one has failed
    sys.exit(verdict.exit_code)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
