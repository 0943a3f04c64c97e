"""The exchange kernels on GPUs: every output of many replays under skew, and a rank that does not arrive.

    python scripts/gpu_exchange.py OUT.json                                  # ranks are streams of one GPU
    torchrun --standalone --nproc-per-node 2 scripts/gpu_exchange.py OUT.json --two
    python scripts/gpu_exchange.py OUT.json --dry                            # one rank in Triton's interpreter

Prints a table last, on rank 0, and writes OUT.json after each part. A part that fails is reported, and the next one
runs; exit code 1 when one failed. All waits are bounded, and the process ends itself after --limit seconds. Times are
those of scripts/bench_exchange.py.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from exchange_ranks import DRY, NUM_SETS, OPS, Part, Place, Rank, agreed, job, run_parts


def replayed(place: Place, ranks: list[Rank], *, replays: int, limit_s: float, seed: int = 0) -> dict[str, Any]:
    """Replay under random skew, in rounds, with a check of the time limit after each."""
    numbers = random.Random(seed + (0 if place.group is None else place.group.rank() * 7919))
    started = time.monotonic()
    done = 0
    while done < replays:
        for _ in range(min(500, replays - done)):
            for rank in numbers.sample(ranks, len(ranks)):
                delay(rank.stream, numbers)
                rank.graph.replay()
            done += 1
        place.meet()
        if agreed(place, time.monotonic() - started > limit_s):
            break
    mismatches = 0
    for rank in ranks:
        rank.exchange.check()
        mismatches += int(rank.mismatches)
    found = {"replays": done, "exchanges_per_replay": NUM_SETS, "ranks_here": len(ranks), "mismatches": mismatches}
    if mismatches:
        raise AssertionError(f"outputs differ: {found}")
    return found | {"seconds": round(time.monotonic() - started, 1)}


def delay(stream: Any, numbers: random.Random) -> None:
    """One replay in 20 starts up to 50 us late on the device, one in 2000 up to 1 ms late on the host."""
    chance = numbers.random()
    if chance < 0.05 and stream is not None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(numbers.randrange(100_000))
    elif chance > 0.9995:
        time.sleep(numbers.random() * 1e-3)


def several(place: Place, size: int, *, replays: int, limit_s: float) -> dict[str, Any]:
    """Groups of both ops at once, each on streams and graphs of its own."""
    options = {"tokens": 8, "dtype": torch.bfloat16, "groups": 4}
    jobs = [job(place, op, size, **options) for op in ("qk", "norm", "qk", "norm")]
    return replayed(place, [rank for ranks in jobs for rank in ranks], replays=replays, limit_s=limit_s)


def absent(place: Place, op: str, size: int) -> dict[str, Any]:
    """The last rank stops after 20 replays: the other ranks must end, and name it."""
    ranks = job(place, op, size, tokens=8, dtype=torch.bfloat16, max_polls=2**17)
    replayed(place, ranks, replays=20, limit_s=10)
    here = place.numbers(size)
    left = [rank for number, rank in zip(here, ranks, strict=True) if number != size - 1 or size == 1]
    started = time.monotonic()
    for rank in left:
        rank.graph.replay()
    place.synchronize()
    seconds = time.monotonic() - started
    found: dict[str, Any] = {"seconds": round(seconds, 3), "max_polls": 2**17, "messages": []}
    for rank in left:
        try:
            rank.exchange.check()
        except Exception as error:  # what `check` says of the late rank, looked at below
            found["messages"].append(str(error))
            found["mismatches"] = int(rank.mismatches)
    wanted = 0 if size == 1 else len(left)
    named = [message for message in found["messages"] if f" {size - 1} of the group did not" in message]
    place.meet()
    if len(named) != wanted or seconds > 30:
        raise AssertionError(f"not ended in time, or not named: {found}")
    return found


def proofs(place: Place, arguments: argparse.Namespace) -> Iterator[Part]:
    sizes = [1] if DRY else [2, 4, 8] if place.group is None else [place.group.size()]
    replays = arguments.replays
    few = max(replays // 50, 2)
    for size in sizes:
        for op in OPS:
            yield (
                f"proof {op} tp {size}: up to {replays} replays, 8 tokens, bfloat16",
                lambda op=op, size=size: replayed(
                    place, job(place, op, size, tokens=8, dtype=torch.bfloat16), replays=replays, limit_s=32
                ),
            )
    for op in OPS:
        for dtype in (torch.float32, torch.float16):
            yield (
                f"proof {op} tp {sizes[0]}: {dtype}, 3 tokens",
                lambda op=op, dtype=dtype: replayed(
                    place, job(place, op, sizes[0], tokens=3, dtype=dtype), replays=few, limit_s=5
                ),
            )
        for size in sizes:
            tokens = 20 if DRY else 300
            yield (
                f"proof {op} tp {size}: {tokens} tokens, more than programs",
                lambda op=op, size=size, tokens=tokens: replayed(
                    place, job(place, op, size, tokens=tokens, dtype=torch.bfloat16), replays=few, limit_s=5
                ),
            )
    yield "proof: 4 groups, 2 of each kernel, at once", lambda: several(place, sizes[0], replays=few, limit_s=8)
    for op in OPS:
        yield f"absent rank: {op} tp {sizes[-1]}", lambda op=op: absent(place, op, sizes[-1])


if __name__ == "__main__":
    run_parts(__doc__, proofs)
