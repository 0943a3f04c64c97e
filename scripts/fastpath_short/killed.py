"""Two processes exchange on one GPU, and one of them is killed: the other must end, and name it: $OUT/killed.json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import DRY, EPS, OUT, SIZE, WIDTH, Report, randn, rotary, weight  # isort: skip

import torch
import torch.distributed as dist

from tpcompile.errors import FastPathError
from tpcompile.fastpath.kernels import all_reduce_norm, qk_exchange
from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_words, polls_in
from tpcompile.torch_api import interpreted

WAIT_S = 6.0
"""Most seconds that a wait may take."""
LIMIT_S = 120.0 if DRY else 31.0
KEPT: list[Any] = []
"""Mappings of files, kept alive."""


def killed() -> None:
    """Start two ranks, kill one while both exchange, and read the error of the other."""
    report = Report("killed")
    for file in ("store", "looping", "survivor.json"):
        (OUT / file).unlink(missing_ok=True)
    flags = ["--dry"] if DRY else []
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), *flags]) for rank in range(2)]
    deadline = time.monotonic() + LIMIT_S
    try:
        wait_for(OUT / "looping", deadline)
        time.sleep(1.0)
        os.kill(ranks[1].pid, signal.SIGKILL)
        wait_for(OUT / "survivor.json", deadline)
        report.add("rank 0 after rank 1 was killed", **json.loads((OUT / "survivor.json").read_text()))
        ranks[0].wait(max(0.1, deadline - time.monotonic()))
    except Exception as error:  # a result, too: the other parts still run
        report.add("rank 0 after rank 1 was killed", FAILED=f"{type(error).__name__}: {error}")
    finally:
        for rank in ranks:
            rank.kill()


def wait_for(file: Path, deadline: float) -> None:
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {file.name} in time")
        time.sleep(0.05)


def rank(number: int) -> None:
    """Exchange by both kernels in turn, until an exchange reports that the other rank did not arrive."""
    dist.init_process_group("gloo", init_method=f"file://{OUT}/store", rank=number, world_size=2)
    with torch.no_grad():
        loop(number)
    sys.stdout.flush()
    os._exit(0)  # the group has lost a rank


def loop(number: int) -> None:
    calls = exchanging(number)
    dist.barrier()
    started, count = time.monotonic(), 0
    while time.monotonic() - started < LIMIT_S:
        seconds, said = {}, {}
        for name, (call, exchange) in calls.items():
            begun = time.monotonic()
            call()
            seconds[name] = round(time.monotonic() - begun, 2)
            said[name] = message(exchange)
        count += 1
        if count == 5 and number == 0:
            (OUT / "looping").touch()
        if any(said.values()) and number == 0:
            found = {"exchanges": count, "limit_s": WAIT_S, "waited_s": seconds, "says": said}
            (OUT / "part").write_text(json.dumps(found))
            (OUT / "part").rename(OUT / "survivor.json")
            return


def message(exchange: Any) -> str:
    try:
        exchange.check()  # waits for the GPU
    except FastPathError as error:
        return str(error)
    return ""


def exchanging(number: int) -> dict[str, tuple[Callable[[], Any], Any]]:
    """The calls of a rank, and the exchange of each."""
    tokens, local = (1 if DRY else 8), WIDTH // 2
    given = rotary(tokens, q_BSd=local, k_BSc=SIZE) | {"q_weight_d": weight(local), "counts": (WIDTH, 2 * SIZE)}
    x, partial = randn(tokens, WIDTH), randn(tokens, WIDTH)
    pair, row = (exchange_of(number, tokens, words) for words in (2, all_reduce_norm.words_of(WIDTH, x.dtype, tokens)))
    rest = {"eps": EPS, "exchange": row}

    def qk() -> Any:
        return synchronized(qk_exchange.qk_norm_rope_exchange(**given, exchange=pair))

    def norm() -> Any:
        return synchronized(all_reduce_norm.all_reduce_add_rms_norm(x, partial, weight(WIDTH), **rest))

    return {"qk": (qk, pair), "norm": (norm, row)}


def synchronized(outputs: Any) -> Any:
    if not DRY:
        torch.cuda.synchronize()
    return outputs


def exchange_of(number: int, tokens: int, row_words: int) -> Any:
    """In symmetric memory; in a file that both processes map where there is no GPU."""
    rows = {"num_rows": tokens, "row_words": row_words}
    if not DRY:
        polls = polls_in(WAIT_S)
        return Exchange.of_group(dist.group.WORLD, device=torch.device("cuda", 0), max_polls=polls, **rows)

    interpreted.patient()
    size, files = num_words(2, **rows), [OUT / f"words_{each}_{row_words}" for each in range(2)]
    files[number].write_bytes(bytes(8 * size))
    dist.barrier()
    memories = [torch.from_file(str(file), shared=True, size=size, dtype=torch.int64) for file in files]
    KEPT.extend(memories)
    addresses = [memory.data_ptr() for memory in memories]
    return Exchange.between(addresses, rank=number, memory=memories[number], num_programs=2, max_polls=2**11, **rows)


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    rank(int(names[0])) if names else killed()
