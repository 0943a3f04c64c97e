"""What torch knows of this machine -> JSON on stdout: the process that `tpcompile doctor` asks.

A driver may hang or crash it, and the command itself imports no torch.
"""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.torch_api.compiler import triton_version
from tpcompile.torch_api.tested_versions import untested


def facts() -> dict[str, Any]:
    """The fields of `doctor.torch_says.Answer`."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    pairs = permutations(range(num_gpus), 2)
    no_access = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return {
        "torch": torch.__version__,
        "untested": untested(torch.__version__),
        "cuda": torch.version.cuda or "",
        "triton": triton_version(),
        "gpus": [f"{one.name} ({one.total_memory >> 30} GiB, sm_{one.major}{one.minor})" for one in gpus],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if num_gpus else "",
        "backends": [name for name, is_available in backends.items() if is_available()],
        "no_peer_access": no_access,
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
