"""A user's program under torchrun: equal on all ranks, and then with a constant of each rank; both are checked."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from tpcompile.evidence.records import Verdict


def checked(scale: int) -> Verdict:
    """Compile a product with `scale` and compare it with the other ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.compiler.reset()  # the second program is the same code
    program = torch.compile(lambda x: torch.relu(x) * scale)
    with tpcompile.capture(mesh) as run:
        program(torch.ones(4))
    verdict = tpcompile.check(run)
    if dist.get_rank() == 0:
        verdict.print()
    return verdict


def main() -> int:
    """The exit code of the second verdict, where the first is green."""
    healthy = checked(scale=2)
    if healthy.exit_code:
        return 3
    broken = checked(scale=dist.get_rank() + 1)
    print(tpcompile.__file__)
    dist.barrier()  # torchrun ends the others as soon as one has failed
    return broken.exit_code


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        sys.exit(main())
    finally:
        dist.destroy_process_group()
