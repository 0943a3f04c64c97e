"""What N recompiles of a region with a collective put into the job's store: operations, bytes and keys, by rank 0 of 2.

    python scripts/bench_recompiles.py --recompiles 100,500,2000 --json results/recompiles_cpu.json

No GPU. Each row is a job of 2 gloo ranks under a Sentinel, whose region is called with another constant each time:
every call compiles, and every compile is compared. `keys` are those of the store beyond the keys at the start: the most
that were there, and those left when both ranks had left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_scale import Counted, Rank, Tally
from tpcompile import Sentinel, collectives

_FORK = multiprocessing.get_context("fork")
_WORLD, _TIMEOUT_S, _POLL_S = 2, 1800.0, 0.2


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))


def job(rank: int, port: int, number: int, steady: int, results: Any) -> None:
    """One rank: `number` calls that compile, then `steady` calls of what is compiled."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2 * number + 100
    dist.init_process_group("gloo", store=dist.PrefixStore("job", client(port)), rank=rank, world_size=_WORLD)
    tally = Tally()

    def connect(name: str) -> Rank:
        counted: Any = Counted(client(port), tally, f"{name}/")
        return Rank(counted, rank=rank, world_size=_WORLD)

    def step(x: torch.Tensor, factor: int) -> torch.Tensor:
        return collectives.all_reduce(x * factor, group=dist.group.WORLD)

    compiled = torch.compile(step, backend="eager", dynamic=False)
    x = torch.ones(4)
    dist.barrier()
    with Sentinel(connect=connect, flow=False) as sentinel:
        for factor in range(number):
            compiled(x, factor)
        for call in range(steady):
            compiled(x, call % number)
    assert not sentinel.findings
    results.put((rank, dict(tally.counts), sentinel.stats["compiles"]))
    dist.barrier()
    dist.destroy_process_group()


def kinds(keys: list[str]) -> dict[str, int]:
    """How many keys of each kind the sentinel has: `decided`, `event`, ..."""
    own = [key.split("/") for key in keys if key.startswith("tpcompile/")]
    return dict(Counter(next((part for part in parts[2:] if part.isalpha()), parts[-1]) for parts in own))


def measure(number: int, steady: int) -> dict[str, Any]:
    """One job."""
    server = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S)
    )
    results, most, is_over = _FORK.Queue(), [0], threading.Event()
    ranks = [_FORK.Process(target=job, args=(rank, server.port, number, steady, results)) for rank in range(_WORLD)]
    for process in ranks:
        process.start()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            most[0] = max(most[0], server.num_keys())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    (_, counts, compiles), _ = sorted(results.get(timeout=_TIMEOUT_S) for _ in ranks)
    wall_s = time.monotonic() - began
    for process in ranks:
        process.join()
    is_over.set()
    watching.join()
    return {
        "recompiles": number,
        "steady_calls": steady,
        "compiles": compiles,
        "wall_s": round(wall_s, 1),
        "most_keys": most[0],
        "keys_left": kinds(server.list_keys()),
        **{name.replace(" ", "_"): counts[name] for name in ("operations", "bytes set", "bytes got")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recompiles", default="100,500", help="numbers of recompiles, a job each")
    parser.add_argument("--steady", type=int, default=0, help="calls of compiled variants after them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for number in map(int, arguments.recompiles.split(",")):
        rows.append(measure(number, arguments.steady))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "command": "python scripts/bench_recompiles.py " + " ".join(sys.argv[1:]),
        "machine": f"CPU, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
