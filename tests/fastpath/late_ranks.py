"""`python -m tests.fastpath.late_ranks`: the scenarios of `exchanging`, and ranks that do not arrive.

Prints a line of JSON for each as it ends, so that one that hangs takes no other with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is declared

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tests.fastpath.exchanging import (
    DENSE,
    EPS,
    SCENARIOS,
    TOLERANCE,
    Heads,
    Rows,
    checked,
    failure_of,
    off,
    on_ranks,
    scenario,
)
from tpcompile.fastpath import peers, registered
from tpcompile.fastpath.certify.at_once import shared_words
from tpcompile.fastpath.kernels import all_reduce_norm, exchange
from tpcompile.fastpath.kernels.exchange_memory import Exchange
from tpcompile.torch_api import interpreted


class Survivors:
    """From now on a survivor looks for words when all survivors have written theirs; and its looks are counted."""

    def __init__(self, here: Tensor, rank: int) -> None:
        self.here, self.rank, self.looks = here, rank, 0
        """`here`: 1 for each rank that has written; in shared memory."""
        self.load = InterpreterBuilder.create_masked_load
        InterpreterBuilder.create_masked_load = lambda *given: self._counted(*given)

    def _counted(self, *given: Any) -> Any:
        *_, is_volatile = given
        if is_volatile:
            self.looks += 1
            self.here[self.rank] = 1
            while not self.here.all():
                time.sleep(1e-3)
        return self.load(*given)


@scenario("killed")
def _killed() -> list[Any]:
    """Rank 1 ends after two exchanges. Polls are few only from then on, when no other rank can be late."""
    data, here = Heads([1, 1, 1], [1, 1, 1], tokens=1), shared_words(3, torch.device("cpu"))

    def run(rank: int, exchanges: list[Exchange]) -> dict[str, Any]:
        (side,) = exchanges
        for index in range(2):
            call, wanted = data.call(rank, index)
            assert off(call(exchange=side), wanted) < TOLERANCE[data.dtype] and not checked(side)
        if rank == 1:
            here[rank] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        side.state[exchange._MAX_POLLS.value] = 200
        survivors, looks = Survivors(here, rank), []
        for index in (2, 3):
            call, _ = data.call(rank, index)
            survivors.looks = 0
            outputs = call(exchange=side)
            looks.append(survivors.looks)
        return {"looks": looks, "is_nan": all(bool(x.isnan().all()) for x in outputs), "check": checked(side)}

    return on_ranks(3, run, data.rows)


@contextmanager
def hosted_store() -> Iterator[None]:
    """A store at MASTER_PORT, in a process of its own: ranks are forked from this one, and a thread of the store that
    looks up the address of a client at that moment would leave them a lock that nobody releases."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    pid = os.fork()
    if pid == 0:
        _store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        signal.pause()
    listener.close()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def in_a_job(rank: int, size: int, exchanges: list[Exchange]) -> list[Exchange]:
    """The exchanges as those of a process group, whose store `hosted_store` serves."""
    client = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=client, rank=rank, world_size=size)
    return [replace(side, group=dist.group.WORLD, name=str(number)) for number, side in enumerate(exchanges)]


def meet(told: Tensor, rank: int) -> None:
    """Wait until all ranks have written a number into shared memory."""
    told[rank] = 1
    wait_until(lambda: bool(told.all()))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(1e-3)


@scenario("refused")
def _refused() -> list[Any]:
    """Rank 1 passes a wrong dtype in eager, rank 2 a wrong width in compiled code; rank 0 is right, and waits."""
    data, told = Rows(3, tokens=1), shared_words(3, torch.device("cpu"))

    def run(rank: int, exchanges: list[Exchange]) -> dict[str, Any]:
        (side,) = in_a_job(rank, 3, exchanges)
        call, _ = data.call(rank, 0)
        x, partial_D, weight = call.args
        bad = (partial_D, partial_D.half(), torch.cat((partial_D, partial_D)))[rank]
        step = partial(all_reduce_norm.all_reduce_add_rms_norm, eps=EPS, exchange=side)
        run_step = torch.compile(step, backend="aot_eager") if rank == 2 else step
        raised = failure_of(lambda: run_step(x, bad, weight))
        meet(told, rank)
        return {"raised": raised, "alone": checked(side), "check": failure_of(lambda: peers.check(side))}

    with hosted_store():
        return on_ranks(3, run, data.rows, max_polls=ENDLESS)


ENDLESS = 2**40
"""Polls."""
QK, WORDS, DENSE_ROWS = Heads([2, 2], [1, 1]), Rows(2), Rows(2, least_rows=DENSE, dtype="bfloat16")
SPOILED = {
    "q in float64": (QK, lambda q, *rest: (q.double(), *rest)),
    "q with gaps": (QK, lambda q, *rest: (q.repeat_interleave(2, -1)[..., ::2], *rest)),
    "q that is wider": (QK, lambda q, *rest: (torch.cat((q, q), -1), *rest)),
    "a partial sum in float16": (WORDS, lambda x, part, weight: (x, part.half(), weight)),
    "more rows than the exchange holds": (WORDS, lambda x, part, weight: (x.tile(4, 1), part.tile(4, 1), weight)),
    "a wider partial sum, dense rows": (DENSE_ROWS, lambda x, part, weight: (x, part.tile(2), weight)),
}
"""What rank 1 alone gets wrong -> its data, and its arguments made of the right ones."""


def spoiled(what: str, *, max_polls: int, closes: bool = True, compiles: bool = False) -> list[Any]:
    """Rank 1 refuses the second call, rank 0 makes it and two more, of this exchange and of a second one."""
    data, spoil = SPOILED[what]
    refused, told = (shared_words(2, torch.device("cpu")) for _ in range(2))

    def run(rank: int, exchanges: list[Exchange]) -> dict[str, Any]:
        first, second = in_a_job(rank, 2, exchanges)
        call, wanted = data.call(rank, 0)
        for side in (first, second):
            assert off(call(exchange=side), wanted) < TOLERANCE[data.dtype] and not checked(side)
        if not closes:
            Exchange.close = lambda _side: None  # type: ignore[method-assign]
        bad: Any = partial(call.func, *spoil(*call.args), **call.keywords) if rank == 1 else call
        if compiles and rank == 1:
            bad = torch.compile(bad, backend="aot_eager", fullgraph=True, dynamic=False)
        counted = Survivors(torch.ones(2), rank)
        outputs: list[Any] = []
        raised = failure_of(lambda: outputs.append(bad(exchange=first)))
        looks = counted.looks
        meet(refused, rank)  # the first exchange is closed before the second, for which rank 0 would wait until then
        if rank == 0:
            outputs += [call(exchange=first), call(exchange=second)]
        meet(told, rank)
        return {
            "raised": raised,
            "looks": [looks, counted.looks - looks],
            "has_nan": [any(bool(x.isnan().any()) for x in each) for each in outputs],
            "is_nan": [all(bool(x.isnan().all()) for x in each) for each in outputs],
            "checks": [failure_of(partial(peers.check, side)) for side in (first, second)],
        }

    with hosted_store():
        return on_ranks(2, run, data.rows, data.rows, max_polls=max_polls)


@scenario("one rank refuses")
def _one_rank_refuses() -> dict[str, list[Any]]:
    found = {what: spoiled(what, max_polls=ENDLESS) for what in SPOILED}
    wrong_when_compiled = "more rows than the exchange holds"
    return found | {"compiled": spoiled(wrong_when_compiled, max_polls=ENDLESS, compiles=True)}


@scenario("one rank refuses and closes nothing")
def _closes_nothing() -> list[Any]:
    return spoiled("a partial sum in float16", max_polls=200, closes=False)


@scenario("refused alike")
def _refused_alike() -> list[Any]:
    """All ranks refuse their first call, which two catch in eager and one in the op; rank 1 then makes no other."""
    data, done = Rows(3, tokens=1), shared_words(3, torch.device("cpu"))

    def run(rank: int, exchanges: list[Exchange]) -> dict[str, Any]:
        peers._ALIKE_S = 60.0  # ranks of a busy machine are further apart than half a second
        (side,) = in_a_job(rank, 3, exchanges)
        call, _ = data.call(rank, 0)
        x, partial_D, weight = call.args
        bad = torch.cat((partial_D, partial_D)) if rank == 2 else partial_D.double()
        refused = failure_of(lambda: all_reduce_norm.all_reduce_add_rms_norm(x, bad, weight, eps=EPS, exchange=side))
        if rank != 1:
            call(exchange=side)
        meet(done, rank)
        return {"refused": refused, "count": side.turns.count, "check": failure_of(lambda: peers.check(side))}

    with hosted_store():
        return on_ranks(3, run, data.rows, max_polls=200)


@scenario("two threads")
def _two_threads() -> list[Any]:
    """A second thread calls while a kernel of the first waits for a peer, which comes once that call has ended."""
    data, ended = Rows(2, tokens=1), shared_words(1, torch.device("cpu"))

    def run(rank: int, exchanges: list[Exchange]) -> list[str]:
        call, _ = data.call(rank, 0)
        calls = partial(failure_of, partial(call, exchange=exchanges[0]))
        if rank == 1:
            wait_until(lambda: bool(ended[0]))
            return [calls()]
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(calls) for _ in range(2)]
            wait(found, return_when=FIRST_COMPLETED)
            ended[0] = 1
            return sorted(each.result() for each in found)

    return on_ranks(2, run, data.rows, max_polls=5000)


def main() -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()  # imports Dynamo, as the first call of a custom op does
    interpreted.like_gpus()  # and what a first launch does, before ranks are forked
    for name in ("qk_norm_rope_exchange", "all_reduce_add_rms_norm"):
        interpreted.rewrite(registered()[name].source.functions)
    for name, run in SCENARIOS.items():
        try:
            found = run()
        except Exception:
            found = traceback.format_exc()
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
