"""What each rank chose -> a fast path or its reference, for one shape class; the same on all ranks of a group.

A rank that alone ran a fast path, or ran it with a different grid, would wait for its peers in an exchange that they
never join. So each rank chooses by a pure function, the choices go through the store once, and all ranks take the fast
path only if all have chosen it, have the same model of GPU, and can run it. Kernels that wait for each other fill as
many multiprocessors on every rank as the smallest GPU has; that number is part of the decision.
"""

from __future__ import annotations

import importlib
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.text.ranks import exact_ranks, named_ranks
from tpcompile.fastpath.certificate import device_kind, uncertified
from tpcompile.fastpath.measured import Decision, Ratio, ShapeClass, choose, shipped_table
from tpcompile.fastpath.registry import FastPath, dtype_name, registered
from tpcompile.ranks.agree import agree
from tpcompile.ranks.store import RankStore
from tpcompile.sink import Sink

logger = Sink("fast paths")
_NUMBERS: Counter[str] = Counter()
_MADE: dict[str, tuple[Decision, Decision]] = {}
"""Fast path and shape class -> what this rank chose, and what the ranks agreed on."""


class Processor(Frozen):
    """What kernels of a rank run on."""

    model: str
    """Name of the GPU, `NVIDIA H200`; without one `interpreter` or `cpu`."""
    num_multiprocessors: int | None = None
    """None without a GPU."""

    @classmethod
    def here(cls) -> Processor:
        """The current device of this process."""
        if not torch.cuda.is_available():
            return cls(model=device_kind())
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(model=properties.name, num_multiprocessors=properties.multi_processor_count)


class Vote(Frozen):
    """What one rank chose for a shape class, and what limits it."""

    decision: Decision
    processor: Processor
    obstacle: str = ""
    """Why it cannot run the fast path; empty when it can, or when it chose the reference."""
    host: str = ""
    """Its host, when kernels write into the memory of the other ranks and wait for them."""

    @property
    def exchanges(self) -> bool:
        """True when kernels of the ranks wait for each other."""
        return bool(self.host)


def settle(votes: Mapping[int, Vote], missing: Collection[int] = ()) -> Decision:
    """The votes of the ranks, by rank -> what all of them run."""
    decisions = [one.decision for one in votes.values()]
    wanted = first(decision for decision in decisions if decision.is_used)
    if wanted is None:
        return decisions[0]
    reasons = "; ".join(_reasons(votes, missing))
    if reasons:
        return _refused(wanted, reasons)
    limits: set[int | None] = set()
    for one in votes.values():
        if one.exchanges:  # kernels that wait must all be on the GPU at once, and were measured with so many
            limits |= {one.decision.num_programs, one.processor.num_multiprocessors}
    return wanted.model_copy(update={"num_programs": min(filter(None, limits), default=None)})


def _refused(wanted: Decision, why: str) -> Decision:
    return wanted.model_copy(update={"is_used": False, "num_programs": None, "is_refused": True, "why": why})


def _reasons(votes: Mapping[int, Vote], missing: Collection[int]) -> Iterator[str]:
    """Why a fast path that a rank chose cannot run on all."""
    if missing:
        yield f"{named_ranks(sorted(missing))} did not decide in time"
    unable = [rank for rank, one in votes.items() if one.obstacle]
    for why, ranks in grouped(unable, lambda rank: votes[rank].obstacle).items():
        yield f"{named_ranks(ranks)}: {why}"
    decisions = _by_ranks(votes, lambda one: one.decision.says)
    if len(decisions) > 1:
        yield " / ".join(decisions)
    models = _by_ranks(votes, lambda one: one.processor.model)
    if len(models) > 1:
        yield f"different GPUs: {' / '.join(models)}"
    waiting = {rank: one for rank, one in votes.items() if one.exchanges}
    hosts = _by_ranks(waiting, lambda one: one.host)
    if len(hosts) > 1:
        yield f"its kernels write into the memory of all ranks: {', '.join(hosts)}"


def obstacle(decision: Decision, device: str) -> str:
    """Why this process cannot run what was chosen; empty when it can."""
    if not decision.is_used:
        return ""
    # The fast path of that name; imports those that ship with tpcompile, and Triton with them.
    if decision.path not in registered():
        with suppress(ImportError):
            importlib.import_module("tpcompile.fastpath.kernels.all")
    path = registered().get(decision.path)
    if path is None:
        return "it is not registered here; install and import the package that has it"
    if path.min_sm > _capability(device):
        return f"it needs sm_{path.min_sm}, and this is {device}"
    if device == "cpu" and path.source.kernels:
        return "Triton needs a GPU, or TRITON_INTERPRET=1"
    shape = decision.shape
    if not takes(path, shape.dtype):
        return f"it does not take {shape.dtype}"
    if shape.tp == 1:
        return ""
    if not path.is_tp_aware:
        return f"it is declared tp={path.tp}, at {path.line}"
    return uncertified(path, tp=shape.tp, dtypes=[shape.dtype])


def takes(path: FastPath, dtype: str) -> bool:
    """True when the fast path accepts that element type."""
    return not path.dtypes or dtype in map(dtype_name, path.dtypes)


class Selection:
    """Chooses between fast paths and their references, alike on all ranks of one tensor-parallel group.

    Every rank of the group makes one and calls `decide` for the same shapes. The first call for a shape class exchanges
    the ranks' votes through the store, in milliseconds; later calls are a lookup. If a rank does not call within
    `timeout_s`, all ranks use the reference, that rank too when it calls later. When a fast path was chosen and cannot
    be used on all ranks, the lowest rank warns on stderr. `table` is by default the one that ships with tpcompile; with
    `ask_table=False` every fast path that can run is chosen, whatever its speed.
    Raises RuntimeError when no store is served.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        table: Sequence[Ratio] | None = None,
        ask_table: bool = True,
        timeout_s: float = 60.0,
        store: dist.Store | None = None,
    ) -> None:
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._table = shipped_table() if table is None else tuple(table)
        self._ask_table = ask_table
        self._timeout_s = timeout_s
        self._device = device_kind()
        self._processor = Processor.here()
        self._agreed: dict[tuple[str, ShapeClass], Decision] = {}
        members = exact_ranks(self._ranks)
        _NUMBERS[members] += 1
        self._store = RankStore.of_job(f"tpcompile/fastpath/{members}/{_NUMBERS[members]}", store)
        logger.rank = self._store.rank

    def decide(self, name: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, *, variant: str = "") -> Decision:
        """What all ranks run for tensors of these shapes: the fast path `name`, or its reference."""
        shape = ShapeClass.of(shapes, dtype, tp=len(self._ranks), variant=variant)
        if (name, shape) not in self._agreed:
            chosen = Decision(path=name, shape=shape, is_used=True, why="chosen without a measurement")
            if self._ask_table:
                chosen = choose(name, shape, self._processor.model, self._table)
            self._agreed[name, shape] = self._agree(chosen)
        return self._agreed[name, shape]

    def _agree(self, chosen: Decision) -> Decision:
        why = obstacle(chosen, self._device)
        path = registered().get(chosen.path) if chosen.is_used else None
        host = socket.gethostname() if path is not None and path.exchanges else ""
        vote = Vote(decision=chosen, processor=self._processor, obstacle=why, host=host)
        agreed = agree(
            self._store.under(chosen.label),
            self._ranks,
            vote,
            kind=Vote,
            decide=settle,
            result=Decision,
            timeout_s=self._timeout_s,
        )
        if agreed.label != chosen.label:
            agreed = _refused(chosen, f"the ranks settled {agreed.label} instead")
        _MADE[chosen.label] = chosen, agreed
        if agreed.is_refused and self._store.rank == min(self._ranks):
            logger.warning("all ranks use the reference of fast path {}: {}", agreed.label, agreed.why)
        return agreed


def statuses() -> list[tuple[str, str]]:
    """Fast path and shape class -> `used: why`, `refused: why` or `not applicable: why`, of all decisions so far."""
    return [(label, agreed.status) for label, (_, agreed) in _MADE.items()]


def choices() -> dict[str, str]:
    """Entries for the environment of this rank: its own choices, and the launches that the ranks agreed on.

    `choice of PATH for SHAPES` is equal on ranks with equal tables and GPUs, `launch of PATH for SHAPES` on all.
    """
    chosen = {f"choice of {label}": chosen.says for label, (chosen, _) in _MADE.items()}
    launches = {f"launch of {label}": agreed.says for label, (_, agreed) in _MADE.items() if agreed.is_used}
    return chosen | launches


def _capability(device: str) -> int:
    """90 for `sm90`; 0 for a CPU; the maximum for Triton's interpreter, which runs any kernel."""
    if device == "interpreter":
        return sys.maxsize
    return int(device.removeprefix("sm")) if device.startswith("sm") else 0


def _by_ranks(votes: Mapping[int, Vote], value: Callable[[Vote], Hashable]) -> list[str]:
    """`VALUE on ranks 0-1` for each value."""
    groups = grouped(votes, lambda rank: value(votes[rank]))
    return [f"{each} on {named_ranks(ranks)}" for each, ranks in groups.items()]
