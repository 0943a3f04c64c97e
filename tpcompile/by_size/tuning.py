"""A group of GPUs -> the cell of its table: times of its sums by size and algorithm, in CUDA graphs.

Every sum follows a kernel that writes its input, as in a block, and the time of that kernel alone is taken off. `nccl`
is the in-place all-reduce that Inductor issues; `one_shot` and `two_shot` are the op of this package, with the copies
that it makes. For two ranks, a product whose sum is pushed by copy engines is timed beside the same product with NCCL
and with the fastest algorithm for that size, once alone and once with a second product beside the sum. Rounds alternate
between the forms; a time is the median over rounds of the slowest rank's. NVLink multicast is never used.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.by_size import in_flight, workspace
from tpcompile.by_size.op import OP, chosen
from tpcompile.by_size.table import NCCL, PAIR, Cell, Measured, MeasuredInFlight, fastest_rows, least_pushed, text_of
from tpcompile.torch_api import c10d

SIZES = [64, 512] + [4096 << step for step in range(14)] + [48 << 20]
"""Bytes: statistics of 8 and 64 tokens, 4 KiB to 32 MiB, and the 4680 tokens of wan14b."""
SIZES_IN_FLIGHT = [1 << 20 << step for step in range(7)]
DTYPE = torch.bfloat16
ALGORITHMS = ("one_shot", "two_shot")
_INNER, _WIDTH = 2048, 4096
"""The products that are summed, [m, 2048] @ [2048, 4096]: the smaller of the two of a Llama-8B block at tp 2."""
_CALLS = 20
_ROUNDS = 9
_ROUND_US = 3000.0
"""About how long one form runs in one round."""
_DRIVER = Path("/proc/driver/nvidia/version")
Sum = Callable[[Tensor], Tensor]
Step = Callable[[int], object]
"""Queues one call, given its number in the graph."""


class Timed:
    """A CUDA graph of calls."""

    def __init__(self, step: Step) -> None:
        step(0)  # makes memory and communicators, which a capture must not
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for number in range(_CALLS):
                step(number)

    def us(self, replays: int) -> float:
        """Of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph.replay()
        start.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / replays / _CALLS


class Bench:
    """Times of calls on the ranks of a group, which all of them make alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.name = group, device, group.group_name

    def nccl(self, x: Tensor) -> Tensor:
        """As Inductor issues it."""
        summed: Tensor = c10d.ops.wait_tensor(c10d.ops.all_reduce_(x, "sum", self.name))
        return summed

    def by_rows(self, rows: str) -> Sum:
        """As the pass leaves it or replaces it."""

        def call(x: Tensor) -> Tensor:
            is_nccl = chosen(x, rows, self.group.size()) == NCCL
            summed: Tensor = self.nccl(x) if is_nccl else OP(x, rows, self.name)
            return summed

        return call

    def forms(self, num_bytes: int) -> dict[str, Sum]:
        """Each algorithm, for messages of that size."""
        return {NCCL: self.nccl, **{name: self.by_rows(f"{num_bytes}:{name}") for name in ALGORITHMS}}

    def times(self, num_bytes: int, forms: Mapping[str, Sum]) -> dict[str, float]:
        """us of each form, without the kernel before it; the slowest rank of each round."""
        source = torch.zeros(num_bytes // DTYPE.itemsize, dtype=DTYPE, device=self.device)
        x = torch.empty_like(source)

        def step_of(form: Sum) -> Step:
            def step(_: int) -> None:
                torch.mul(source, 1.0, out=x)
                form(x)

            return step

        steps = {name: step_of(form) for name, form in {"nothing": lambda x: x, **forms}.items()}
        medians = self._medians(steps, about_us=5 + num_bytes / 2e5)
        before = medians.pop("nothing")
        return {name: round(us - before, 3) for name, us in medians.items()}

    def times_in_flight(self, num_bytes: int, rows: str) -> dict[str, float]:
        """us of a product, its sum and an addition in the forms of `products`."""
        steps = products(self.name, self.device, num_bytes, self.by_rows(rows))
        return {name: round(us, 3) for name, us in self._medians(steps, about_us=20 + num_bytes / 1e5).items()}

    def make_memory(self, num_bytes: int) -> None:
        """Make the workspace for messages of up to so many bytes."""
        largest = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        workspace.workspace_of(self.name, self.device).view_like(largest)

    def _medians(self, steps: Mapping[str, Step], *, about_us: float) -> dict[str, float]:
        graphs = {name: Timed(step) for name, step in steps.items()}
        replays = max(2, int(_ROUND_US / _CALLS / about_us))
        self._slowest([0.0])
        rounds = [self._slowest([graph.us(replays) for graph in graphs.values()]) for _ in range(_ROUNDS)]
        return {name: statistics.median(us) for name, us in zip(graphs, zip(*rounds, strict=True), strict=True)}

    def _slowest(self, us: list[float]) -> list[float]:
        """The largest of all ranks, which meet here."""
        found = torch.tensor(us, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return list(found.tolist())


def measure(group: dist.ProcessGroup, device: torch.device, gpu: str, command: str) -> Cell:
    """The cell of a group with NCCL, whose ranks share memory; about ten seconds.

    Collective; equal on all ranks, as times are of the slowest. The memory of messages is freed again. Raises
    RuntimeError where the ranks cannot map the memory of each other, or one has too little.
    """
    bench, name = Bench(group, device), group.group_name
    with torch.no_grad(), workspace.apart(workspace.OF_GROUPS, name, device):
        bench.make_memory(SIZES[-1])
        sums = [Measured(size_bytes=size, us=bench.times(size, bench.forms(size))) for size in SIZES]
        return cell_of(gpu, bench, sums, pushed(bench, text_of(fastest_rows(sums))), command)


def pushed(bench: Bench, rows: str) -> list[MeasuredInFlight]:
    """Products of two ranks, by size; none for more ranks. The memory that `rows` need has been made."""
    found: list[MeasuredInFlight] = []
    if bench.group.size() == PAIR:
        with torch.no_grad(), workspace.apart(in_flight.OF_GROUPS, bench.name, bench.device):
            for size in reversed(SIZES_IN_FLIGHT):  # the largest makes the memory for all
                found.insert(0, MeasuredInFlight(size_bytes=size, us=bench.times_in_flight(size, rows)))
    return found


def cell_of(
    gpu: str, bench: Bench, sums: Iterable[Measured], products: Iterable[MeasuredInFlight], command: str
) -> Cell:
    """What is chosen by these times."""
    sums, products = tuple(sums), tuple(products)
    return Cell(
        gpu=gpu,
        num_ranks=bench.group.size(),
        rows=fastest_rows(sums),
        push_from_bytes=least_pushed(products),
        measured=sums,
        in_flight=products,
        command=command,
        versions=versions(),
    )


def products(name: str, device: torch.device, num_bytes: int, by_rows: Sum) -> dict[str, Step]:
    """A product of so many bytes, its sum over two ranks, and an addition that reads it, in six forms: equal tensors.

    The addition is of zeros where nothing is pushed, so that all write and read as much.
    """
    height = num_bytes // DTYPE.itemsize // _WIDTH
    drawn = torch.Generator(device).manual_seed(0)  # zeros take less power, and thereby less time

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=device).normal_(generator=drawn)

    a, b = random(height, _INNER), random(_INNER, _WIDTH)
    nothing = torch.zeros(height, _WIDTH, dtype=DTYPE, device=device)

    def nccl(_: int) -> Tensor:
        return nothing + c10d.ops.wait_tensor(c10d.ops.all_reduce_(a @ b, "sum", name))

    def nccl_beside(_: int) -> Tensor:
        pending = c10d.ops.all_reduce_(a @ b, "sum", name)
        torch.mm(a, b)
        return nothing + c10d.ops.wait_tensor(pending)

    def whole(_: int) -> Tensor:
        return nothing + by_rows(a @ b)

    def whole_beside(_: int) -> Tensor:
        summed = by_rows(a @ b)
        torch.mm(a, b)
        return nothing + summed

    def push(number: int) -> Tensor:
        x = in_flight.OPS.product(a, b, [], *_place(number), name)
        return received(x, [x], number)

    def push_beside(number: int) -> Tensor:
        x = a @ b
        started = in_flight.OPS.start(x, [], *_place(number), name)
        return received(x, [started, a @ b], number)

    def received(x: Tensor, after: list[Tensor], number: int) -> Tensor:
        slot, _, _ = _place(number)
        part = in_flight.OPS.receive(after, x.numel(), x.dtype, slot, name)
        y = x + part[: x.numel()].view(x.shape)
        in_flight.OPS.release(y, after)
        return y

    alone = {"nccl": nccl, "by_rows": whole, "push": push}
    return {**alone, "nccl_beside": nccl_beside, "by_rows_beside": whole_beside, "push_beside": push_beside}


def _place(number: int) -> tuple[int, int, bool]:
    """Slot of a sum, number of slots, and whether the ranks meet before it: one at a time is in flight."""
    return number % 2, 2, number == 0


def versions() -> dict[str, str]:
    """Of what the times depend on."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    driver = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else ""
    return {"torch": torch.__version__, "nccl": nccl, "driver": driver, "python": platform.python_version()}
