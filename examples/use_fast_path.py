"""The fast path of examples/fast_path.py in a compiled program; the verdict says whether it may be used on shards."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from examples.fast_path import head_norm


def main() -> int:
    """The exit code of the verdict: 1 until the fast path is certified."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with tpcompile.capture(mesh) as run:
        torch.compile(lambda x: head_norm(x.sin(), 1e-6), backend="aot_eager")(torch.ones(2, 3, 4, 8))
    verdict = tpcompile.check(run)
    verdict.print()
    return verdict.exit_code


if __name__ == "__main__":
    dist.init_process_group("gloo")
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
