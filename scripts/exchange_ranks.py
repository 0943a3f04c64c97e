"""Shared by scripts/gpu_exchange.py and bench_exchange.py: ranks of the exchange kernels, each with a CUDA graph.

Ranks are streams of one GPU, processes of torchrun with a GPU each, or one rank in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
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
from tpcompile.fastpath.kernels import all_reduce_norm, qk_exchange  # noqa: E402
from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_words  # noqa: E402

HEADS, HEAD_SIZE, WIDTH = (8, 16, 64) if DRY else (40, 128, 5120)
EPS = 1e-6
NUM_SETS = 4
"""Sets of data that the exchanges of one graph use in turn, so that words of a previous exchange are detected."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BITS = {4: torch.int32, 2: torch.int16}
_FREE_SMS = 4
"""Multiprocessors left free for kernels that compare outputs while waiting programs fill all others."""
_PROGRAMS_PER_SM = 4
"""At most, of an exchange. They are spread over all multiprocessors first: with more of them than multiprocessors none
is idle, and a kernel that needs a different split of shared memory waits for an idle one."""
_LAST_PART_S = 20
"""Seconds that must be left to begin another part."""
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
        """Wait until all ranks are here and their GPUs are idle."""
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


OPS = {
    "qk": (qk_rank, lambda dtype, num_rows: 2),
    "norm": (norm_rank, lambda dtype, num_rows: all_reduce_norm.words_of(WIDTH, dtype, num_rows)),
}


def job(
    place: Place, op: str, size: int, *, tokens: int, dtype: torch.dtype, groups: int = 1, **limits: int
) -> list[Rank]:
    """Ranks that run here, each with its graph, after a first pass that is checked against the plain code."""
    make, words = OPS[op]
    programs = _PROGRAMS_PER_SM * groups * (1 if place.group else size)
    limits = {"num_programs": max(1, (place.num_sms() - _FREE_SMS) // programs), "max_polls": 2**21} | limits
    exchanges = place.exchanges(size, num_rows=tokens, row_words=words(dtype, tokens), **limits)
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


def agreed(place: Place, value: bool) -> bool:
    """True on all ranks when it is on one."""
    if place.control is None:
        return value
    flag = torch.tensor(int(value))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=place.control)
    return bool(flag)


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


def result_line(name: str, result: dict[str, Any]) -> str:
    shown = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()]
    return f"{name:58} | {', '.join(shown)}"


Part = tuple[str, Callable[[], dict[str, Any]]]


def run_parts(description: str | None, parts: Callable[[Place, argparse.Namespace], Iterator[Part]]) -> None:
    """Run one after the other, write OUT.json after each, print all last; the process ends here, 1 when one failed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--two", action="store_true", help="Ranks are the processes of torchrun, a GPU each.")
    parser.add_argument("--dry", action="store_true", help="One rank on the CPU, in Triton's interpreter.")
    parser.add_argument("--replays", type=int, default=2 if DRY else 100_000, help="Of a proof.")
    parser.add_argument("--limit", type=float, default=150, help="Seconds after which the process ends itself.")
    parser.add_argument("--only", default="", help="Run the parts whose name contains this.")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    started = time.monotonic()
    with placed(arguments.two) as place, torch.no_grad():
        report: dict[str, Any] = {"machine": machine(place), "parts": {}}
        failed = False
        for name, part in parts(place, arguments):
            if arguments.only not in name:
                continue
            if agreed(place, time.monotonic() - started > arguments.limit - _LAST_PART_S):
                report["parts"][name] = {"LEFT OUT": "no time"}
                continue
            begun = time.monotonic()
            try:
                result = part()
            except Exception as error:  # reported, and the next part runs
                failed = True
                result = {"FAILED": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            result["part_s"] = round(time.monotonic() - begun, 1)
            report["parts"][name] = result
            if place.is_first:
                print(result_line(name, result), file=sys.stderr, flush=True)
                arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
        report["seconds"] = round(time.monotonic() - started, 1)
        if place.is_first:
            arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
            print("\n".join(result_line(*item) for item in report["parts"].items()))
            print(f"{report['machine']}, {report['seconds']} s, {'FAILED' if failed else 'passed'}", flush=True)
    sys.stdout.flush()
    os._exit(int(failed))  # destroy_process_group waits for graphs that captured NCCL
