"""A torchrun target: the gate on CPUs of a machine in which torch sees GPUs, as far as the groups of a mesh go.

torchrun ... tests/gate/beside_gpus.py RUN_DIR

Where CUDA is available and the default group is gloo, torch makes a group of its own for a mesh over all ranks.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcompile import config, gate
from tpcompile.gate import running


def mesh_beside_gpus(*args: Any, **kwargs: Any) -> DeviceMesh:
    """`init_device_mesh` as it is where there is a GPU."""
    with mock.patch("torch.cuda.is_available", return_value=True):
        mesh = init_device_mesh(*args, **kwargs)
    assert mesh.get_group("tp") is not dist.group.WORLD, "torch has changed: the mesh shares the default group"
    return mesh


if __name__ == "__main__":
    with mock.patch.object(running, "init_device_mesh", mesh_beside_gpus):
        overrides = ["compile.backend=eager", "gate.steady_calls=2", "gate.resized_seq_len=16"]
        settings = config.load("cpu_smoke", overrides, device="cpu")
        sys.exit(gate.run(settings, run_dir=sys.argv[1], quiet=True))
