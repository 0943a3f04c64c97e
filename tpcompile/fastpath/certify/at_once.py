"""Ranks that wait for each other within a kernel, on one device: streams of a GPU, or processes of the interpreter."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import DivergenceError, FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.certify.fences import fenced_allocations
from tpcompile.fastpath.certify.trials import Call, OnRanks
from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_words
from tpcompile.ranks.children import in_children
from tpcompile.torch_api.interpreted import patient

_FACTORS = (3.0, 1.0)
"""Factors of the activations in each round; the last round is compared, so that words left by the one before show."""
_SKEW_S = 0.005
"""Seconds by which ranks start apart in a round, so that kernels do wait for their peers."""
_CPU_S = 10.0
"""Limit of a rank of a case, which takes 1 s; by the clock twenty times as long, for a rank that sleeps as it polls."""
_MAX_POLLS = {"cpu": 2**11, "cuda": 2**22}
"""Polls that take a few seconds."""
_FEW_POLLS = 20
_ENDLESS = {"cpu": 2**40, "cuda": 2**22}
"""Polls of a kernel that must not poll; limited on a GPU, where a kernel cannot be killed."""
_POLLS_AT, _LATE_AT = 1, 2
"""Places in `Exchange.state`."""
_PAIR = 2
"""Words of a row without a flag."""
_ALONE = 0
"""The rank that is run once more while its peers do not arrive."""
_BEFORE_STATE = (1, 0)
"""What precedes `Exchange.state` in memory, for mutations that subtract an offset: a late rank, and no polls."""


def at_once(*, num_rows: int, row_words: int, num_programs: int) -> OnRanks:
    """`Trial.on_ranks` for launchers that take an `exchange` of this many rows and words.

    Choose `num_programs` so small that a program has several rows, and that all programs of all ranks fit on a GPU.
    """

    def on_ranks(call: Call, ranks: list[dict[str, Any]]) -> list[tuple[Tensor, ...]]:
        size = num_words(len(ranks), num_rows=num_rows, row_words=row_words)
        device = next(value.device for value in ranks[0].values() if isinstance(value, Tensor))
        memories = [shared_words(size, device) for _ in ranks]
        sides = between(memories, num_rows=num_rows, row_words=row_words, num_programs=num_programs)
        exchanges = []
        for side in sides:
            state = torch.cat((side.state.new_tensor(_BEFORE_STATE), side.state))
            exchanges.append(replace(side, state=state[len(_BEFORE_STATE) :]))
        run = _on_streams if device.type == "cuda" else _in_processes
        return run(call, ranks, exchanges)

    return on_ranks


def shared_words(size: int, device: torch.device) -> Tensor:
    """Words of zero that streams of one GPU, or processes forked from this one, can all write.

    As many words lie before them and twice as many behind them, where `check_unused` looks for writes.
    """
    if device.type == "cuda":
        memory = torch.zeros(4 * size, dtype=torch.int64, device=device)
    else:
        memory = torch.frombuffer(mmap.mmap(-1, max(4 * size, 1) * 8), dtype=torch.int64)
    return memory[size : 2 * size]


def between(memories: list[Tensor], *, num_rows: int, row_words: int, **limits: int) -> list[Exchange]:
    """The sides of all ranks, on one device."""
    limits = {"max_polls": _MAX_POLLS[memories[0].device.type]} | limits
    addresses = [memory.data_ptr() for memory in memories]
    return [
        Exchange.between(addresses, rank=rank, num_rows=num_rows, row_words=row_words, memory=memory, **limits)
        for rank, memory in enumerate(memories)
    ]


def check_unused(exchange: Exchange) -> None:
    """Raise DivergenceError when a kernel wrote around the memory, or words of a row that none exchanged."""
    size = exchange.memory.numel()
    around = exchange.memory.as_strided((4 * size,), (1,), 0)
    if around[:size].any() or around[2 * size :].any():
        raise DivergenceError("a kernel wrote words outside of the exchange")
    words = exchange.memory.view(2, exchange.num_ranks, exchange.num_rows, exchange.row_words)
    epochs = exchange.state[-exchange.num_rows :]
    if words[:, :, epochs == 0].any():
        raise DivergenceError("a kernel wrote words of a row that it does not exchange")


def check_late(run: Callable[[], tuple[Tensor, ...]], exchange: Exchange) -> None:
    """Raise DivergenceError unless a call whose peers never arrive ends, returns NaN, and records the late ranks.

    Odd ranks have written only the odd words, even ranks the even words. The next call must not wait. Call it on one
    rank when all are done; the exchange cannot be used after it.
    """
    epochs = exchange.state[-exchange.num_rows :]
    if exchange.num_ranks == 1 or not epochs.any():
        return
    late = (int(epochs.max()) + 1) << 32 | sum(1 << rank for rank in range(exchange.num_ranks) if rank != _ALONE)
    _publish_half(exchange, epochs)
    exchange.state[_POLLS_AT] = _FEW_POLLS
    _check_late_call(run(), exchange, late)
    exchange.state[_POLLS_AT] = _ENDLESS[exchange.state.device.type]
    outputs = run()
    _check_late_call(outputs, exchange, late)
    if not all(output.isnan().all() for output in outputs):
        raise DivergenceError("a kernel computed with words that had not come")


def _publish_half(exchange: Exchange, epochs: Tensor) -> None:
    """Write what the peers of rank 0 have written when they stop half-way in the next exchange, before any flag."""
    end = exchange.row_words if exchange.row_words == _PAIR else exchange.row_words - 1
    words = exchange.memory.view(2, exchange.num_ranks, exchange.num_rows, exchange.row_words)
    for row in epochs.nonzero().flatten().tolist():
        epoch = int(epochs[row]) + 1
        for rank in range(1, exchange.num_ranks):
            words[epoch % 2, rank, row, rank % 2 : end : 2] = epoch << 32


def _check_late_call(outputs: tuple[Tensor, ...], exchange: Exchange, late: int) -> None:
    kept = int(exchange.state[_LATE_AT])
    if kept != late:
        raise DivergenceError(f"late ranks are kept as {kept:#x} and not as {late:#x}")
    if not any(output.isnan().any() for output in outputs):
        raise DivergenceError("a kernel whose peers did not come gave no NaN")
    try:
        exchange.check()
    except FastPathError:
        return
    raise DivergenceError("late ranks are kept, and `Exchange.check` passes")


def _in_processes(call: Call, ranks: list[dict[str, Any]], exchanges: list[Exchange]) -> list[tuple[Tensor, ...]]:
    calls = [partial(_rounds, call, *each) for each in zip(ranks, exchanges, strict=True)]
    outputs = []
    for rank, ended in enumerate(in_children(calls, jobs=len(calls), cpu_s=_CPU_S)):
        if ended.failure:
            raise DivergenceError(f"rank {rank}: {ended.failure}")
        outputs.append(ended.result)
    return outputs


def _rounds(call: Call, arguments: dict[str, Any], exchange: Exchange) -> tuple[Tensor, ...]:
    """Run all rounds on one rank -> the outputs of the last."""
    patient()
    rank = int(exchange.state[0])
    with fenced_allocations():
        for index, factor in enumerate(_FACTORS):
            time.sleep(_SKEW_S * ((rank + index) % 3))
            outputs = call(_round(arguments, factor, exchange), plain.alone)
    exchange.check()
    check_unused(exchange)
    if rank == _ALONE:
        check_late(lambda: call(_round(arguments, 1.0, exchange), plain.alone), exchange)
    return tuple(output.detach().clone() for output in outputs)


def _on_streams(call: Call, ranks: list[dict[str, Any]], exchanges: list[Exchange]) -> list[tuple[Tensor, ...]]:
    streams = [torch.cuda.Stream() for _ in ranks]
    _load_kernels(call, ranks, exchanges, streams)
    for factor in _FACTORS:
        given = [_round(arguments, factor, exchange) for arguments, exchange in zip(ranks, exchanges, strict=True)]
        outputs = _on_each(call, given, streams)
    for exchange in exchanges:
        exchange.check()
        check_unused(exchange)
    alone = _round(ranks[_ALONE], 1.0, exchanges[_ALONE])
    side = exchanges[_ALONE]
    check_late(lambda: call(alone, plain.alone), side)
    return outputs


def _on_each(call: Call, given: list[dict[str, Any]], streams: list[Any]) -> list[tuple[Tensor, ...]]:
    torch.cuda.synchronize()
    outputs = []
    for arguments, stream in zip(given, streams, strict=True):
        with torch.cuda.stream(stream):
            outputs.append(call(arguments, plain.alone))
    torch.cuda.synchronize()
    return outputs


def _load_kernels(call: Call, ranks: list[dict[str, Any]], exchanges: list[Exchange], streams: list[Any]) -> None:
    """Compile, load and allocate before the rounds: all three wait for kernels, which then wait for later ranks."""
    before = [exchange.state.clone() for exchange in exchanges]
    for exchange in exchanges:
        exchange.state[_LATE_AT] = 1  # as if a wait had run out: no kernel waits
    rounds = map(_round, ranks, [1.0] * len(ranks), exchanges)
    _on_each(call, list(rounds), streams)
    for exchange, state in zip(exchanges, before, strict=True):
        exchange.state.copy_(state)
        exchange.memory.zero_()


def _round(arguments: Mapping[str, Any], factor: float, exchange: Exchange) -> dict[str, Any]:
    given = {**arguments, "exchange": exchange}
    if factor == 1.0:
        return given
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() > 1:
            given[name] = value * factor
    return given
