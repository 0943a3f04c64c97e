"""`python -m tests.dryrun.watched` -> the lines that were seen of each way to learn the rank, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.dryrun.learns import WAYS
from tpcompile.dryrun.machine import Machine
from tpcompile.dryrun.reads import watched_reads
from tpcompile.target import build
from tpcompile.typecheck.check import fake_ranks

VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
NOTHING = "nothing"


def lines(way: str) -> list[tuple[str, int]]:
    """File and number of each line that was seen while rank 0 of 16 built the program."""
    os.environ.update(VARIABLES)
    machine = Machine("")
    function = "nothing" if way == NOTHING else "build"
    with watched_reads() as found, fake_ranks(16):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        with machine.building():
            build(f"tests.dryrun.learns:{function}", [f"way={way}"], rank=0, device=machine.device, mesh=mesh)
    return [(Path(line.file).name, line.line) for line in found]


def main() -> None:
    """Each way in a process of its own."""
    torch.set_num_threads(1)
    found = {}
    with TemporaryDirectory() as folder:
        for number, way in enumerate((NOTHING, *WAYS)):
            file = Path(folder, str(number))
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    file.write_text(json.dumps(lines(way)))
                    code = 0
                finally:
                    os._exit(code)
            os.waitpid(pid, 0)
            found[way] = json.loads(file.read_text()) if file.exists() else None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
