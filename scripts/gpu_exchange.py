"""The exchange kernels on GPUs: every output of many replays under skew, a rank that does not come, and times.

    python scripts/gpu_exchange.py OUT.json                                  # ranks are streams of one GPU
    torchrun --standalone --nproc-per-node 2 scripts/gpu_exchange.py OUT.json --two
    python scripts/gpu_exchange.py OUT.json --dry                            # one rank in Triton's interpreter

Prints a table last, on rank 0, and writes OUT.json after each part. A part that fails is reported, and the next one
runs; exit code 1 when one failed. All waits are bounded, and the process ends itself after --limit seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that wait for each other need a queue each

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from tpcompile.fastpath import plain  # noqa: E402
from tpcompile.fastpath.kernels import all_reduce_norm, qk_exchange, qk_norm  # noqa: E402
from tpcompile.fastpath.kernels.exchange import Exchange, num_words  # noqa: E402

HEADS, HEAD_SIZE, WIDTH = (8, 16, 64) if DRY else (40, 128, 5120)
EPS = 1e-6
NUM_SETS = 4
"""Sets of data that the exchanges of one graph take in turn, so that words of the exchange before would show."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BITS = {4: torch.int32, 2: torch.int16}
_FREE_SMS = 4
"""For kernels that compare outputs, when waiting programs fill all others."""
_PROGRAMS_PER_SM = 4
"""At most, of an exchange. They are spread over all multiprocessors first: with more of them than multiprocessors none
is idle, and a kernel that needs another split of its memory waits for one that is."""
_LAST_PART_S = 20
"""No part is begun when less is left."""
Outputs = tuple[Tensor, ...]


@dataclass
class Place:
    """Where this process runs its ranks."""

    device: torch.device
    group: Any = None
    """Of NCCL, when ranks are processes."""
    control: Any = None
    """Of gloo with a time limit, between parts."""

    @property
    def is_first(self) -> bool:
        return self.group is None or self.group.rank() == 0

    def numbers(self, size: int) -> list[int]:
        """Ranks that run here."""
        return list(range(size)) if self.group is None else [self.group.rank()]

    def meet(self) -> None:
        """All ranks are here, and no GPU of theirs works."""
        self.synchronize()
        if self.control is not None:
            dist.barrier(group=self.control)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def num_sms(self) -> int:
        if self.device.type != "cuda":
            return 8
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def exchanges(self, size: int, *, num_rows: int, row_words: int, **limits: int) -> list[Exchange]:
        """One for each rank that runs here."""
        if self.group is not None:
            rows = {"num_rows": num_rows, "row_words": row_words}
            return [Exchange.of_group(self.group, device=self.device, **rows, **limits)]
        words = num_words(size, num_rows=num_rows, row_words=row_words)
        memories = [torch.zeros(words, dtype=torch.int64, device=self.device) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in memories]
        make = partial(Exchange.between, addresses, num_rows=num_rows, row_words=row_words, **limits)
        return [make(rank=rank, memory=memory) for rank, memory in enumerate(memories)]


@dataclass
class Graph:
    """A function, replayed by a CUDA graph; called where there is no GPU."""

    run: Callable[[], Any]
    stream: Any
    graph: Any = None
    result: Any = None

    def __post_init__(self) -> None:
        if self.stream is None:
            return
        gc.collect()  # what the part before left would be freed within the capture, which ends it
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.result = self.run()
        torch.cuda.synchronize()

    def replay(self) -> None:
        with on(self.stream):
            if self.graph is None:
                self.result = self.run()
            else:
                self.graph.replay()


@dataclass
class Rank:
    """One rank of a job."""

    exchange: Exchange
    calls: list[Callable[[], Outputs]]
    """One for each set of data."""
    references: list[Outputs]
    """What the plain code gives on joined data."""
    stream: Any
    mismatches: Tensor
    expected: list[Outputs] = field(default_factory=list)
    graph: Graph | None = None

    def compared(self) -> None:
        """All exchanges of one replay, each output compared bit by bit."""
        for call, expected in zip(self.calls, self.expected, strict=True):
            for output, wanted in zip(call(), expected, strict=True):
                bits = BITS[output.element_size()]
                self.mismatches += (output.view(bits) != wanted.view(bits)).any()


def on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def qk_rank(rank: int, size: int, *, tokens: int, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    """(call of an exchange, reference) for each set of data."""
    heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
    own = slice(heads.start * HEAD_SIZE, heads.stop * HEAD_SIZE)
    for index in range(NUM_SETS):
        generator = torch.Generator().manual_seed(index)
        q, k = (random_rows(tokens, HEADS * HEAD_SIZE, generator) * 2.0**index for _ in range(2))
        weight = torch.linspace(0.5, 2, HEADS * HEAD_SIZE)
        angles = torch.randn(tokens, HEAD_SIZE // 2, generator=generator)
        moved = [x.to(device, dtype) for x in (q[None], k[None], weight, 1 / weight, angles.cos(), angles.sin())]
        options = {"counts": (HEADS * HEAD_SIZE,) * 2, "eps": EPS}
        whole = plain.qk_norm_rope(*moved, **options)
        local = [*(x[..., own].contiguous() for x in moved[:4]), *moved[4:]]
        call = partial(qk_exchange.qk_norm_rope_exchange, *local, **options)
        yield call, tuple(x[:, heads] for x in whole)


def norm_rank(rank: int, size: int, *, tokens: int, dtype: torch.dtype, device: torch.device) -> Iterator[Any]:
    for index in range(NUM_SETS):
        generator = torch.Generator().manual_seed(index)
        x = random_rows(tokens, WIDTH, generator).to(device, dtype)
        partials = [(random_rows(tokens, WIDTH, generator) * 2.0**index).to(device, dtype) for _ in range(size)]
        weight = torch.linspace(0.5, 2, WIDTH).to(device, dtype)
        total = sum(partial.float() for partial in partials)
        summed = (x.float() + total).to(dtype)
        normed = plain.normalized(summed, plain.sum_of_squares(summed) / WIDTH, EPS) * weight
        call = partial(all_reduce_norm.all_reduce_add_rms_norm, x, partials[rank], weight, eps=EPS)
        yield call, (summed, normed)


def random_rows(tokens: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(tokens, width, generator=generator) * torch.logspace(-1, 0, width)


OPS = {"qk": (qk_rank, lambda dtype: 2), "norm": (norm_rank, lambda dtype: all_reduce_norm.words_of(WIDTH, dtype))}


def job(
    place: Place, op: str, size: int, *, tokens: int, dtype: torch.dtype, groups: int = 1, **limits: int
) -> list[Rank]:
    """Ranks that run here, each with its graph, after a first pass that is checked against the plain code."""
    make, words = OPS[op]
    programs = _PROGRAMS_PER_SM * groups * (1 if place.group else size)
    limits = {"num_programs": max(1, (place.num_sms() - _FREE_SMS) // programs), "max_polls": 2**21} | limits
    exchanges = place.exchanges(size, num_rows=tokens, row_words=words(dtype), **limits)
    ranks = []
    for number, exchange in zip(place.numbers(size), exchanges, strict=True):
        pairs = list(make(number, size, tokens=tokens, dtype=dtype, device=place.device))
        ranks.append(
            Rank(
                exchange=exchange,
                calls=[partial(call, exchange=exchange) for call, _ in pairs],
                references=[reference for _, reference in pairs],
                stream=torch.cuda.Stream() if place.device.type == "cuda" else None,
                mismatches=torch.zeros((), dtype=torch.int64, device=place.device),
            )
        )
    load_kernels(place, ranks)
    first_pass(place, ranks, dtype)
    for rank in ranks:
        rank.graph = Graph(rank.compared, rank.stream)
    place.meet()
    return ranks


def load_kernels(place: Place, ranks: list[Rank]) -> None:
    """Compile, load, allocate: that would wait for kernels, which wait for kernels that are launched later."""
    place.meet()
    for rank in ranks:
        before = rank.exchange.state.clone()
        rank.exchange.state[2] = 1  # as if a wait had run out: no kernel waits
        rank.expected = [tuple(output.clone() for output in call()) for call in rank.calls]
        with on(rank.stream):
            rank.compared()
        place.synchronize()
        rank.exchange.state.copy_(before)
        rank.mismatches.zero_()
    place.meet()
    for rank in ranks:
        rank.exchange.memory.zero_()
    place.meet()


def first_pass(place: Place, ranks: list[Rank], dtype: torch.dtype) -> None:
    for rank in ranks:
        with on(rank.stream):  # without an allocation, which may wait for kernels that run
            for call, kept in zip(rank.calls, rank.expected, strict=True):
                for output, expected in zip(call(), kept, strict=True):
                    expected.copy_(output)
    place.synchronize()
    for rank in ranks:
        rank.exchange.check()
        for found, wanted in zip(rank.expected, rank.references, strict=True):
            errors = [relative(*pair) for pair in zip(found, wanted, strict=True)]
            if not max(errors) <= TOLERANCE[dtype]:
                raise AssertionError(f"off the plain code by {errors} (limit {TOLERANCE[dtype]})")


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def replayed(place: Place, ranks: list[Rank], *, replays: int, limit_s: float, seed: int = 0) -> dict[str, Any]:
    """Replay under random skew; in rounds, so that the time can be looked at."""
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


def agreed(place: Place, value: bool) -> bool:
    """True on all ranks when it is on one."""
    if place.control is None:
        return value
    flag = torch.tensor(int(value))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=place.control)
    return bool(flag)


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
    """The last rank does not come after 20 replays: the others end, and name it."""
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
        except Exception as error:
            found["messages"].append(str(error))
            found["mismatches"] = int(rank.mismatches)
    wanted = 0 if size == 1 else len(left)
    named = [message for message in found["messages"] if f" {size - 1} of the group did not" in message]
    place.meet()
    if len(named) != wanted or seconds > 30:
        raise AssertionError(f"not ended in time, or not named: {found}")
    return found


def proofs(place: Place, sizes: list[int], replays: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    few = max(replays // 50, 2)
    for size in sizes:
        for op in OPS:
            yield (
                f"proof {op} tp {size}: {replays} replays, 8 tokens, bfloat16",
                lambda op=op, size=size: replayed(
                    place, job(place, op, size, tokens=8, dtype=torch.bfloat16), replays=replays, limit_s=16
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


def times(
    place: Place, forms: dict[str, list[Callable[[], Any]]], *, calls: int = 2 if DRY else 20
) -> dict[str, float]:
    """us a call: form -> its function on each rank here, in CUDA graphs of 20 calls, in interleaved rounds."""
    graphs = {}
    for name, functions in forms.items():
        place.meet()
        streams = [torch.cuda.Stream() if place.device.type == "cuda" else None for _ in functions]
        graphs[name] = [
            Graph(partial(repeated, function, calls), stream)
            for function, stream in zip(functions, streams, strict=True)
        ]
    spent: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(2 if DRY else 7):
        for name, members in graphs.items():
            place.meet()
            for _ in range(3):  # ranks that start at different times are together after that
                replay(members)
            spent[name].append(clocked(place, members, replays=1 if DRY else 20) / calls)
    return {name: statistics.median(found) for name, found in spent.items()}


def clocked(place: Place, members: list[Graph], *, replays: int) -> float:
    """us a replay, of the slowest rank here."""
    if place.device.type != "cuda":
        started = time.perf_counter()
        replay(members)
        return (time.perf_counter() - started) * 1e6
    events = [[torch.cuda.Event(enable_timing=True) for _ in members] for _ in range(2)]
    for event, graph in zip(events[0], members, strict=True):
        event.record(graph.stream)
    for _ in range(replays):
        replay(members)
    for event, graph in zip(events[1], members, strict=True):
        event.record(graph.stream)
    place.synchronize()
    return max(start.elapsed_time(end) for start, end in zip(*events, strict=True)) / replays * 1e3


def replay(members: list[Graph]) -> None:
    for graph in members:
        graph.replay()


def repeated(function: Callable[[], Any], calls: int) -> Any:
    for _ in range(calls):
        result = function()
    return result


def alone_forms(place: Place, op: str, tokens: int) -> dict[str, Any]:
    """The work of one rank of two without its peer: one kernel against what Inductor makes of the plain code."""
    device, dtype = place.device, torch.bfloat16
    row_words = OPS[op][1](dtype)
    limits = {"num_rows": tokens, "row_words": row_words, "num_programs": place.num_sms()}
    (exchange,) = place.exchanges(1, **limits)
    (wider,) = place.exchanges(1, **limits | {"num_programs": tokens})
    torch.compiler.reset()
    if op == "qk":
        arguments, options = qk_shard(tokens, 2, device)
        run: Callable[..., Any] = partial(qk_exchange.qk_norm_rope_exchange, *arguments, **options)
        reference = torch.compile(lambda: plain.qk_norm_rope(*arguments, **options), dynamic=False)
        forms = {"two kernels": [lambda: qk_norm.qk_norm_rope(*arguments, **options)]}
    else:
        x, partial_sum, weight = norm_shard(tokens, device)
        run = partial(all_reduce_norm.all_reduce_add_rms_norm, x, partial_sum, weight, eps=EPS)
        reference = torch.compile(lambda: plain.add_rms_norm(x, partial_sum, weight, eps=EPS), dynamic=False)
        forms = {}
    forms["Inductor"] = [reference]
    forms["one kernel"] = [lambda: run(exchange=exchange)]
    forms["one kernel, a program a row"] = [lambda: run(exchange=wider)]
    for functions in forms.values():
        functions[0]()
    return with_ratio(times(place, forms))


def simulated_forms(place: Place, op: str, tokens: int) -> dict[str, Any]:
    """Two ranks that share one GPU: what an exchange takes, without a wire."""
    ranks = job(place, op, 2, tokens=tokens, dtype=torch.bfloat16)
    return times(place, {"one kernel, 2 ranks on one GPU": [rank.calls[0] for rank in ranks]})


def qk_shard(tokens: int, size: int, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    width = HEADS * HEAD_SIZE // size
    made = [torch.randn(1, tokens, width) for _ in range(2)]
    made += [torch.rand(width), torch.rand(width)]
    angles = torch.randn(tokens, HEAD_SIZE // 2)
    made += [angles.cos(), angles.sin()]
    return [x.to(device, torch.bfloat16) for x in made], {"counts": (HEADS * HEAD_SIZE,) * 2, "eps": EPS}


def norm_shard(tokens: int, device: torch.device) -> list[Tensor]:
    return [x.to(device, torch.bfloat16) for x in (*torch.randn(2, tokens, WIDTH), torch.rand(WIDTH))]


def with_ratio(found: dict[str, float]) -> dict[str, Any]:
    """One kernel over the best of the others."""
    others = [us for name, us in found.items() if not name.startswith("one kernel")]
    return {**found, "ratio": found["one kernel"] / min(others)}


def two_forms(place: Place, op: str, tokens: int) -> dict[str, Any]:
    """Two GPUs: one kernel against two around NCCL's and torch's one-shot all-reduce."""
    import torch.distributed._symmetric_memory as symm

    torch.compiler.reset()
    group, device, size = place.group, place.device, place.group.size()
    row_words = OPS[op][1](torch.bfloat16)
    limits = {"num_rows": tokens, "row_words": row_words, "max_polls": 2**25}
    counts = {"": place.num_sms(), ", a program a row": tokens}
    exchanges = {name: place.exchanges(size, **limits, num_programs=count)[0] for name, count in counts.items()}

    def oneshot(shape: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        memory = symm.empty(shape, dtype=dtype, device=device)
        symm.rendezvous(memory, group)

        def reduce(x: Tensor) -> Tensor:
            memory.copy_(x)
            return torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", group.group_name)

        return reduce

    def nccl(x: Tensor) -> Tensor:
        x = x.clone() if op == "norm" else x
        dist.all_reduce(x, group=group)
        return x

    if op == "qk":
        arguments, options = qk_shard(tokens, size, device)
        sums = torch.compile(
            lambda q, k: torch.cat((plain.sum_of_squares(q), plain.sum_of_squares(k)), -1), dynamic=False
        )
        apply = torch.compile(
            lambda total: plain.qk_norm_rope(*arguments, **options, all_reduce=lambda _: total), dynamic=False
        )
        shared = oneshot((1, tokens, 2), torch.float32)
        run: Callable[..., Any] = partial(qk_exchange.qk_norm_rope_exchange, *arguments, **options)
        forms: dict[str, Any] = {
            "Inductor, NCCL": lambda: apply(nccl(sums(*arguments[:2]))),
            "Inductor, one-shot": lambda: apply(shared(sums(*arguments[:2]))),
            "our two, NCCL": lambda: qk_norm.qk_norm_rope(*arguments, **options, all_reduce=nccl),
            "our two, one-shot": lambda: qk_norm.qk_norm_rope(*arguments, **options, all_reduce=shared),
        }
    else:
        x, own, weight = norm_shard(tokens, device)
        add = torch.compile(lambda total: plain.add_rms_norm(x, total, weight, eps=EPS), dynamic=False)
        shared = oneshot((tokens, WIDTH), torch.bfloat16)
        run = partial(all_reduce_norm.all_reduce_add_rms_norm, x, own, weight, eps=EPS)
        forms = {
            "Inductor, NCCL": lambda: add(nccl(own)),
            "Inductor, one-shot": lambda: add(shared(own)),
        }
    for name, exchange in exchanges.items():
        forms[f"one kernel{name}"] = partial(run, exchange=exchange)
    place.meet()
    for form in forms.values():
        for _ in range(2):
            form()
        place.meet()
    found = times(place, {name: [form] for name, form in forms.items()})
    for exchange in exchanges.values():
        exchange.check()
    return with_ratio(found)


def timings(place: Place) -> Iterator[tuple[str, Callable[[], Any]]]:
    tokens = {"qk": (2,), "norm": (2,)} if DRY else {"qk": (8, 256, 4680), "norm": (8, 64, 256, 1024)}
    for op, numbers in tokens.items():
        for number in numbers:
            if place.group is not None:
                yield f"us, 2 GPUs: {op}, {number} tokens", partial(two_forms, place, op, number)
                continue
            yield f"us, no peer: {op} of tp 2, {number} tokens", partial(alone_forms, place, op, number)
            if not DRY and number <= 256:
                yield f"us, simulated: {op}, {number} tokens", partial(simulated_forms, place, op, number)


@contextmanager
def placed(two: bool) -> Iterator[Place]:
    if DRY:
        yield Place(torch.device("cpu"))
        return
    if not two:
        torch.cuda.set_device(0)
        yield Place(torch.device("cuda", 0))
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    yield Place(device, dist.group.WORLD, control)


def machine(place: Place) -> dict[str, Any]:
    found = {"command": " ".join([*sys.orig_argv]), "python": platform.python_version(), "torch": torch.__version__}
    found["triton"] = triton.__version__
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        found["gpu"] = f"{torch.cuda.device_count()} x {properties.name}, {properties.multi_processor_count} SMs"
        found["cuda"] = str(torch.version.cuda)
    return found


def told(name: str, result: dict[str, Any]) -> str:
    shown = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()]
    return f"{name:58} | {', '.join(shown)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--two", action="store_true", help="Ranks are the processes of torchrun, a GPU each.")
    parser.add_argument("--dry", action="store_true", help="One rank on the CPU, in Triton's interpreter.")
    parser.add_argument("--replays", type=int, default=2 if DRY else 100_000)
    parser.add_argument("--limit", type=float, default=150, help="Seconds after which the process ends itself.")
    parser.add_argument("--only", default="", help="Run the parts whose name contains this.")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    started = time.monotonic()
    with placed(arguments.two) as place, torch.no_grad():
        sizes = [1] if DRY else [2, 4, 8] if place.group is None else [place.group.size()]
        report: dict[str, Any] = {"machine": machine(place), "parts": {}}
        failed = False
        # The times first: they are few, and proofs take what is left.
        for name, part in (*timings(place), *proofs(place, sizes, arguments.replays)):
            if arguments.only not in name:
                continue
            if agreed(place, time.monotonic() - started > arguments.limit - _LAST_PART_S):
                report["parts"][name] = {"LEFT OUT": "no time"}
                continue
            begun = time.monotonic()
            try:
                result = part()
            except Exception as error:
                failed = True
                result = {"FAILED": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            result["part_s"] = round(time.monotonic() - begun, 1)
            report["parts"][name] = result
            if place.is_first:
                print(told(name, result), file=sys.stderr, flush=True)
                arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
        report["seconds"] = round(time.monotonic() - started, 1)
        if place.is_first:
            arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
            print("\n".join(told(*item) for item in report["parts"].items()))
            print(f"{report['machine']}, {report['seconds']} s, {'FAILED' if failed else 'passed'}", flush=True)
    sys.stdout.flush()
    os._exit(int(failed))  # destroy_process_group waits for graphs that captured NCCL


if __name__ == "__main__":
    main()
