"""Scenarios of the exchange kernels in Triton's interpreter; `tests.fastpath.late_ranks` runs them.

Ranks are processes that are forked from this one and share memory with it.
"""

from __future__ import annotations

import inspect
import os
import random
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is declared

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.certify.at_once import between, shared_words
from tpcompile.fastpath.kernels import all_reduce_norm, exchange, qk_exchange
from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_shared, num_words
from tpcompile.ranks.children import in_children
from tpcompile.torch_api import interpreted

SIZE = 8
"""Of a head."""
EPS = 1e-6
BEHIND_S = 5.0
"""A rank whose exchange has failed writes no more words."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
SCENARIOS: dict[str, Callable[[], Any]] = {}
Ranks = Callable[[int, list[Exchange]], Any]


def scenario(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def declare(run: Callable[[], Any]) -> Callable[[], Any]:
        SCENARIOS[name] = run
        return run

    return declare


@dataclass(frozen=True)
class Heads:
    """What all ranks hold together."""

    q: list[int]
    """Heads of q on each rank."""
    k: list[int]
    tokens: int = 3
    batch: int = 1
    dtype: str = "float32"

    def call(self, rank: int, index: int) -> tuple[Callable[[Exchange], Any], list[Tensor]]:
        """The call of exchange number `index`, and what the plain code gives for this rank."""
        generator = torch.Generator().manual_seed(index)
        dtype = getattr(torch, self.dtype)
        whole, local = [], []
        for heads in (self.q, self.k):
            width = sum(heads) * SIZE
            x = torch.randn(self.batch, self.tokens, width, generator=generator) * 2.0**index
            weight = torch.rand(width, generator=generator) + 0.5
            start = sum(heads[:rank]) * SIZE
            own = slice(start, start + heads[rank] * SIZE)
            whole.append((x.to(dtype), weight.to(dtype)))
            local.append((x[..., own].to(dtype), weight[own].to(dtype)))
        angles = torch.randn(self.tokens, SIZE // 2, generator=generator)
        options: dict[str, Any] = {"counts": (sum(self.q) * SIZE, sum(self.k) * SIZE), "eps": EPS}
        wanted = []
        for heads, output in zip(
            (self.q, self.k), plain.qk_norm_rope(*arguments(whole, angles), **options), strict=True
        ):
            start = sum(heads[:rank])
            wanted.append(output[:, start : start + heads[rank]])
        return partial(qk_exchange.qk_norm_rope_exchange, *arguments(local, angles), **options), wanted

    @property
    def rows(self) -> dict[str, int]:
        return {"num_rows": max(self.batch * self.tokens, 1), "row_words": 2}


def arguments(pairs: list[tuple[Tensor, Tensor]], angles: Tensor) -> list[Tensor]:
    (q, q_weight), (k, k_weight) = pairs
    return [q, k, q_weight, k_weight, angles.cos(), angles.sin()]


@dataclass(frozen=True)
class Rows:
    """A row-parallel output of all ranks."""

    size: int
    width: int = 24
    tokens: int = 3
    dtype: str = "float32"
    least_rows: int = 1
    """Of the exchange; of more than 32 the values go out densely."""

    def call(self, rank: int, index: int) -> tuple[Callable[[Exchange], Any], list[Tensor]]:
        generator = torch.Generator().manual_seed(100 + index)
        dtype = getattr(torch, self.dtype)
        x, *partials = torch.randn(1 + self.size, self.tokens, self.width, generator=generator).to(dtype)
        partials = [each * 2**index for each in partials]
        weight = torch.rand(self.width, generator=generator).to(dtype)
        total = torch.stack([each.float() for each in partials]).sum(0)
        summed = (x.float() + total).to(dtype)
        normed = plain.normalized(summed, plain.sum_of_squares(summed) / self.width, EPS) * weight
        return partial(all_reduce_norm.all_reduce_add_rms_norm, x, partials[rank], weight, eps=EPS), [summed, normed]

    @property
    def rows(self) -> dict[str, int]:
        num_rows = max(self.tokens, self.least_rows)
        words = all_reduce_norm.words_of(self.width, getattr(torch, self.dtype), num_rows)
        return {"num_rows": num_rows, "row_words": words}


class Skew:
    """Delays of one rank before its kernels."""

    def __init__(self, rank: int, most_s: float) -> None:
        self.numbers, self.most_s = random.Random(rank), most_s

    def before(self) -> None:
        time.sleep(self.numbers.random() ** 3 * self.most_s)


@dataclass
class Behind:
    """Rank 1 looks for the words of each exchange but the last when rank 0 has written those of the next one.

    The widest skew that the protocol allows, whatever else the machine does.
    """

    rank: int
    written: Tensor
    """Exchanges of which each rank has written its words; in shared memory."""
    times: int
    is_first_poll: bool = False

    def __post_init__(self) -> None:
        self.load = InterpreterBuilder.create_masked_load
        InterpreterBuilder.create_masked_load = lambda *given: self._waited(*given)

    def before(self) -> None:
        self.is_first_poll = True

    def _waited(self, *given: Any) -> Any:
        *_, is_volatile = given
        if is_volatile and self.is_first_poll:
            self.is_first_poll = False
            self.written[self.rank] += 1
            if self.rank == 1 and self.written[1] < self.times:
                self._wait_for_next_words()
        return self.load(*given)

    def _wait_for_next_words(self) -> None:
        deadline = time.monotonic() + BEHIND_S
        while self.written[0] <= self.written[1] and time.monotonic() < deadline:
            time.sleep(1e-3)


RANK_CPU_S = 10.0
"""Limit of one rank, which takes 2 s or less; one that only waits is ended after twenty times as long."""


def on_ranks(size: int, run: Ranks, *rows: dict[str, int], cpu_s: float = RANK_CPU_S, **limits: int) -> list[Any]:
    """What `run` gives on each rank, with one exchange for each of `rows`; a string where it failed."""
    sides = []
    for each in rows:
        memories = [shared_words(num_shared(size, **each), torch.device("cpu")) for _ in range(size)]
        sides.append(between(memories, **each, **limits))
    calls = [partial(_rank, run, rank, [side[rank] for side in sides]) for rank in range(size)]
    return [ended.failure or ended.result for ended in in_children(calls, jobs=size, cpu_s=cpu_s)]


def _rank(run: Ranks, rank: int, exchanges: list[Exchange]) -> Any:
    interpreted.like_gpus()
    interpreted.patient()
    return run(rank, exchanges)


def off(found: tuple[Tensor, ...], wanted: list[Tensor]) -> float:
    """Largest difference over the largest value; infinite for NaN."""
    worst = 0.0
    for output, expected in zip(found, wanted, strict=True):
        assert output.shape == expected.shape and output.dtype == expected.dtype
        if not expected.numel():
            continue
        error = (output.double() - expected.double()).abs().max() / expected.double().abs().max()
        worst = max(worst, error.item()) if error == error else float("inf")
    return worst


def repeated(*data: Heads | Rows, times: int, delays_of: Callable[[int], Skew | Behind]) -> Ranks:
    """The exchanges of all `data` in turn, `times` each -> how many were off; with the message of `check`."""

    def run(rank: int, exchanges: list[Exchange]) -> dict[str, Any]:
        delays = delays_of(rank)
        count = 0
        for index in range(times):
            for each, side in zip(data, exchanges, strict=True):
                call, wanted = each.call(rank, index)
                delays.before()
                count += off(call(exchange=side), wanted) > TOLERANCE[each.dtype]
        return {"off": count, "checks": [checked(side) for side in exchanges]}

    return run


def checked(side: Exchange) -> str:
    return failure_of(side.check)


def errors(data: Heads | Rows, size: int, **limits: int) -> list[float]:
    """How far each rank is off, in tolerances."""

    def run(rank: int, exchanges: list[Exchange]) -> float:
        call, wanted = data.call(rank, 0)
        found = off(call(exchange=exchanges[0]), wanted) / TOLERANCE[data.dtype]
        exchanges[0].check()
        return found

    return on_ranks(size, run, data.rows, **limits)


@scenario("equal")
def _equal() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in TOLERANCE:
        found[f"qk 2 {dtype}"] = errors(Heads([2, 2], [1, 1], tokens=2, dtype=dtype), 2)
        found[f"norm 2 {dtype} words"] = errors(Rows(2, tokens=2, dtype=dtype), 2)
        found[f"norm 2 {dtype} dense"] = errors(Rows(2, tokens=2, dtype=dtype, least_rows=DENSE), 2)
    found["qk 4 float32 uneven"] = errors(Heads([2, 1, 3, 1], [1, 1, 2, 1]), 4)
    found["qk 2 bfloat16 more rows than programs"] = errors(
        Heads([1, 2], [1, 1], tokens=7, batch=2, dtype="bfloat16"), 2, num_programs=1
    )
    found["norm 4 bfloat16 more rows than programs"] = errors(Rows(4, tokens=5, dtype="bfloat16"), 4, num_programs=2)
    found["qk 2 float32 no tokens"] = errors(Heads([2, 2], [1, 1], tokens=0), 2)
    found["norm 2 float32 no tokens"] = errors(Rows(2, tokens=0), 2)
    found["qk 8 float16"] = errors(Heads([1] * 8, [1] * 8, tokens=1, dtype="float16"), 8)
    return found


@scenario("repeated")
def _repeated() -> list[Any]:
    kinds = (Heads([2, 1, 1], [1, 1, 1], tokens=1), Rows(3, width=8, tokens=1), Rows(3, width=8, least_rows=DENSE))
    run = repeated(*kinds, times=8, delays_of=partial(Skew, most_s=0.02))
    return on_ranks(3, run, *(each.rows for each in kinds))


DENSE = 33
POLLED = Heads([1, 1], [1, 1], tokens=1)


def _under_skew() -> list[Any]:
    times, written = 3, shared_words(2, torch.device("cpu"))
    run = repeated(POLLED, times=times, delays_of=lambda rank: Behind(rank, written, times))
    return on_ranks(2, run, POLLED.rows, max_polls=1500)


scenario("right")(_under_skew)


def broken(name: str, function: Any, before: str, after: str) -> None:
    """Declare the scenario in which a device function has `after` in place of `before`."""

    def run() -> list[Any]:
        right = function.fn.__code__
        source = textwrap.dedent(inspect.getsource(function.fn))
        assert source.count(before) == 1, source
        file = f"<broken: {name}>"
        made: dict[str, Any] = {}
        lines = source.replace(before, after).split("\n", 1)[1]  # without the decorator
        exec(compile(lines, file, "exec"), function.fn.__globals__ | {}, made)
        function.fn.__code__ = made[function.fn.__name__].__code__
        interpreted.forget(function.fn)
        try:
            return _under_skew()
        finally:
            function.fn.__code__ = right
            interpreted.rewrite([function.fn])

    SCENARIOS[f"broken: {name}"] = run


broken("one slot", exchange.row_of, "((tag >> 32) & 1)", "((tag >> 32) & 0)")
broken("epoch not counted", exchange.end, "(tag >> 32).to(tl.int64)", "((tag >> 32) - 1).to(tl.int64)")
broken("words of the wrong rank", exchange.sum_of_pairs, "tl.where(mask, at // 2, 0), row", "tl.where(mask, 0, 0), row")


def failure_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except FastPathError as error:
        return str(error)
    return ""


@scenario("certified")
def _certified() -> dict[str, Any]:
    """Cases in one dtype and the first of two mutations, by ranks that run at once."""
    from tests.fastpath import shipped
    from tpcompile.fastpath.certify import certify, proof

    assert shipped.all_reduce_add_rms_norm
    settings = [proof.Setting(2, torch.bfloat16, torch.device("cpu"))]
    with mock.patch.object(proof, "_settings", return_value=settings):
        proved = certify("all_reduce_add_rms_norm", num_mutations=2)
    return {"cases": proved.num_cases, "caught": proved.power.caught}


@scenario("ops")
def _ops() -> int:
    """Schema and fake of both ops, and one graph for lengths that change."""
    memory = shared_words(num_words(1, num_rows=8, row_words=32), torch.device("cpu"))
    (side,) = between([memory], num_rows=8, row_words=32)
    data = Heads([2], [1], tokens=2)
    call, _ = data.call(0, 0)
    limits = (side.state, side.num_ranks, side.num_programs)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(qk_exchange.qk_exchange, (*call.args, *limits, 16, 8, EPS, False), test_utils=checks)
    x = torch.randn(3, 2, 8)
    torch.library.opcheck(all_reduce_norm.all_reduce_norm, (x, x, torch.ones(8), *limits, EPS, True), test_utils=checks)

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        q, k = qk_exchange.qk_norm_rope_exchange(*given, counts=(16, 8), eps=EPS, exchange=side)
        rows = q.transpose(1, 2).flatten(2)
        return (k, *all_reduce_norm.all_reduce_add_rms_norm(rows, rows, given[2], eps=EPS, exchange=side))

    graphs: list[Any] = []
    compiled = torch.compile(step, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True, dynamic=True)
    for tokens in (2, 3, 5):
        call, _ = Heads([2], [1], tokens=tokens).call(0, 0)
        assert off(compiled(*call.args), list(step(*call.args))) == 0
    assert not checked(side)
    return len(graphs)
