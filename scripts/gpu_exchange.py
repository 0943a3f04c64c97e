"""The exchange kernels on GPUs: every output of many replays under skew, a rank that does not arrive, one that refuses.

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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from exchange_ranks import DRY, NUM_SETS, OPS, Graph, Part, Place, Rank, agreed, job, on, run_parts

from tpcompile.errors import FastPathError
from tpcompile.fastpath import peers
from tpcompile.fastpath.kernels.exchange_memory import LIMIT_S, Exchange, polls_in


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


MOST_S = 2.0
"""From when a rank has refused to the end of the wait for it."""
UNCLOSED = "eager, closing nothing"
HOWS = ("eager", "replay", "capture", "compiled", UNCLOSED)
"""What rank 1 refuses while rank 0 waits: an eager call, while rank 0 makes one or replays a graph; a call that it
captures; one that is too large, in compiled code. The last is a control: the wait runs to its limit."""


def refusing(place: Place, op: str, how: str) -> dict[str, Any]:
    """Rank 1 refuses the call after 20 replays: rank 0 must end soon, and name it with its reason."""
    max_polls = 2**24 if how == UNCLOSED else polls_in(LIMIT_S)
    (rank,) = job(place, op, 2, tokens=8, dtype=torch.bfloat16, max_polls=max_polls)
    replayed(place, [rank], replays=20, limit_s=10)
    with mock.patch.object(Exchange, "close", lambda _: None) if how == UNCLOSED else nullcontext():
        place.meet()
        started = time.monotonic()
        raised = refused(rank, how) if place.group.rank() == 1 else awaited(rank, how)
        place.synchronize()
        seconds = round(time.monotonic() - started, 3)
    place.meet()
    message = failure_of(lambda: peers.check(rank.exchange))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"seconds": seconds, "raised": raised, "check": message}, group=place.control)
    waits, refuses = found
    is_named = f"rank 1 raised FastPathError: {refuses['raised']}" in waits["check"]
    is_soon = waits["seconds"] - refuses["seconds"] < MOST_S
    if not refuses["raised"] or not is_named or is_soon == (how == UNCLOSED):
        raise AssertionError(f"not ended in time, or not named: {found}")
    return {"waited_s": waits["seconds"], "refused_s": refuses["seconds"], "message": waits["check"]}


def awaited(rank: Rank, how: str) -> str:
    """Two calls or a replay of a rank that has right input."""
    with on(rank.stream):
        if how == "replay":
            rank.graph.replay()
        else:
            rank.compared()
    return ""


def refused(rank: Rank, how: str) -> str:
    """What the rank raises that has wrong input."""
    call = rank.calls[0]
    first, *rest = call.args
    wrong = partial(call.func, first.double(), *rest, **call.keywords)
    if how == "capture":
        return failure_of(lambda: Graph(wrong, rank.stream))
    if how == "compiled":
        size = first.shape[-2] + 1
        tokens = [given[..., :1, :].repeat_interleave(size, -2) if given.dim() > 1 else given for given in call.args]
        too_large = partial(call.func, *tokens, **call.keywords)
        return failure_of(torch.compile(lambda: too_large(), fullgraph=True, dynamic=False))
    with on(rank.stream):
        return failure_of(wrong)


def failure_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except FastPathError as error:
        return str(error)
    return ""


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
    if place.group is None:
        return
    for op in OPS:
        for how in HOWS:
            yield f"rank that refuses: {op}, {how}", lambda op=op, how=how: refusing(place, op, how)


if __name__ == "__main__":
    run_parts(__doc__, proofs)
