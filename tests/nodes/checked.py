"""A job that captures what its ranks compile, and checks it: `checked.py WHEN`.

The link is cut by the test where the program waits for it: WHEN is `never`, `inside` the block of `capture`, or
`before` the call of `check`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompile
from tpcompile import checking
from tpcompile.sentinel import Sentinel

WHEN = sys.argv[1]
LIMIT_S = 5.0
checking.Sentinel = partial(Sentinel, unresponsive_s=LIMIT_S)  # type: ignore[misc,assignment]


def wait_for_the_cut() -> None:
    """Until the test says that the link is cut."""
    print("ready", flush=True)
    while not Path("cut").exists():
        time.sleep(0.05)


def main() -> None:
    """A compiled layer, with an all-reduce after each call."""
    layer = torch.compile(torch.nn.Linear(4, 4), backend="eager", dynamic=False)
    with tpcompile.capture(run_dir="run") as run:
        for step in range(3):
            if WHEN == "inside" and step == 2:
                wait_for_the_cut()
            dist.all_reduce(layer(torch.ones(2, 4)).detach())
    if WHEN == "before":
        wait_for_the_cut()
    began_s = time.monotonic()
    try:
        verdict = tpcompile.check(run, timeout_s=LIMIT_S)
    finally:
        print(f"check took {time.monotonic() - began_s:.1f} s", flush=True)
    verdict.print()
    verdict.raise_for_status()


dist.init_process_group("gloo")
try:
    main()
finally:
    dist.destroy_process_group()
