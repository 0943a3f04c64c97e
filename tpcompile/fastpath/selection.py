"""Measurements -> a fast path or its reference, for one shape class; the same on all ranks of a group.

A rank that alone ran a fast path, or ran it with a grid of its own, would wait for its peers in an exchange that they
never join. So each rank chooses by a pure function, the choices go through the store once, and all ranks take the fast
path only where all have chosen the same and all can run it.
"""

from __future__ import annotations

import importlib
import math
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger
from pydantic import TypeAdapter

from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.text.ranks import named_ranks, ranks_text
from tpcompile.fastpath.certificate import device_kind, uncertified
from tpcompile.fastpath.registry import FastPath, registered
from tpcompile.ranks.store import RankStore

_TABLE = Path(__file__).with_name("ratios.json")
_MAX_FACTOR = 4
"""Measured at up to so many times more or fewer tokens, a ratio speaks for a shape class."""
_NUMBERS: Counter[str] = Counter()
_MADE: dict[str, tuple[Decision, Decision]] = {}
"""Fast path and shape class -> what this rank chose, and what the ranks agreed on."""


class Ratio(Frozen):
    """One measured cell of `ratios.json`."""

    path: str
    device: str
    """As in certificates: `sm90`."""
    dtype: str
    tp: int | None
    """None when the tensors do not depend on it."""
    tokens: int
    widths: tuple[int, ...]
    """Sizes of the last dims of the tensors."""
    variant: str = ""
    ratio_to_inductor: float
    """Time of Inductor's code for the reference, divided by that of the fast path: above 1 the fast path is faster.

    Of one that exchanges with its peers: time of the best form with a collective.
    """
    launch: dict[str, int] = {}
    """Launch parameters that were measured: blocks, algorithm, workspace."""
    us: dict[str, float] = {}
    """Time of a call, of `inductor` and of `fast path`."""
    regions: dict[str, float] = {}
    """Compiled regions that a call enters, of both."""
    command: str
    versions: dict[str, str]


class ShapeClass(Frozen):
    """Inputs that share a decision."""

    tokens: int
    """Rounded up to a power of two."""
    widths: tuple[int, ...]
    dtype: str
    tp: int
    variant: str = ""
    """What else decides about the speed: `interleaved`, `train`, `interleaved, train`."""

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtype: torch.dtype, *, tp: int, variant: str = "") -> ShapeClass:
        """The class of these tensors, [..., width] each; the first has all tokens."""
        tokens = _rounded_up(math.prod(shapes[0][:-1]))
        widths = tuple(shape[-1] for shape in shapes)
        return cls(tokens=tokens, widths=widths, dtype=str(dtype).removeprefix("torch."), tp=tp, variant=variant)

    def __str__(self) -> str:
        widths = ", ".join(map(str, self.widths))
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.tokens} tokens of {widths} in {self.dtype} at tp {self.tp}{variant}"


class Decision(Frozen):
    """What runs for a shape class."""

    path: str
    shape: ShapeClass
    is_used: bool = False
    """True for the fast path, False for its reference."""
    launch: dict[str, int] = {}
    why: str
    is_refused: bool = False
    """True when it was chosen, and the ranks could not agree on it."""

    @property
    def label(self) -> str:
        """Fast path and shape class."""
        return f"{self.path} for {self.shape}"

    @property
    def says(self) -> str:
        """`used with blocks=24`, or `reference (why)`."""
        if not self.is_used:
            return f"reference ({self.why})"
        launch = ", ".join(f"{name}={value}" for name, value in sorted(self.launch.items()))
        return f"used with {launch}" if launch else "used"

    @property
    def status(self) -> str:
        """`used: why`, `refused: why` or `not applicable: why`, for the report."""
        unused = "refused" if self.is_refused else "not applicable"
        return f"{'used' if self.is_used else unused}: {self.why}"


class Said(Frozen):
    """What one rank contributes to a decision."""

    decision: Decision
    obstacle: str = ""
    """Why it cannot run the fast path; empty when it can, or when it chose the reference."""
    host: str = ""
    """Its host, when kernels write into the memory of the other ranks."""


def choose(name: str, shape: ShapeClass, device: str, table: Iterable[Ratio]) -> Decision:
    """The fast path where it was measured to be faster than Inductor's code on this device and shape class."""
    cells = [cell for cell in table if _is_about(cell, name, shape, device)]
    near = [cell for cell in cells if _distance(cell, shape) <= math.log2(_MAX_FACTOR)]
    nearest = min(near, key=lambda cell: (_distance(cell, shape), cell.ratio_to_inductor), default=None)
    if nearest is None:
        return Decision(path=name, shape=shape, why=f"not measured on {device} for this shape class")
    why = f"{nearest.ratio_to_inductor:.2f} times the speed of Inductor's code at {nearest.tokens} tokens on {device}"
    if nearest.ratio_to_inductor <= 1:
        return Decision(path=name, shape=shape, why=why)
    return Decision(path=name, shape=shape, is_used=True, launch=nearest.launch, why=why)


def settle(said: Mapping[int, Said], missing: Sequence[int] = ()) -> Decision:
    """What each rank said, by rank -> what all of them run."""
    decisions = [one.decision for one in said.values()]
    wanted = first(decision for decision in decisions if decision.is_used)
    if wanted is None:
        return decisions[0]
    why = "; ".join([*_absences(missing), *_obstacles(said), *_differences(said), *_distances(said)])
    return wanted.model_copy(update={"is_used": False, "launch": {}, "why": why, "is_refused": True}) if why else wanted


def obstacle(decision: Decision, device: str) -> str:
    """Why this process cannot run what was chosen; empty when it can."""
    if not decision.is_used:
        return ""
    path = _registered(decision.path)
    if path is None:
        return "it is not registered here; install and import the package that has it"
    if path.min_sm > _capability(device):
        return f"it needs sm_{path.min_sm}, and this is {device}"
    if device == "cpu" and path.source.kernels:
        return "Triton needs a GPU, or TRITON_INTERPRET=1"
    if not takes(path, decision.shape.dtype):
        return f"it does not take {decision.shape.dtype}"
    if decision.shape.tp == 1:
        return ""
    return uncertified(path) if path.is_tp_aware else f"it is declared tp={path.tp}, at {path.line}"


def _registered(name: str) -> FastPath | None:
    """The fast path; those that ship are imported, and Triton with them, when one is wanted."""
    if name not in registered():
        with suppress(ImportError):
            importlib.import_module("tpcompile.fastpath.kernels.all")
    return registered().get(name)


def takes(path: FastPath, dtype: str) -> bool:
    """Whether it has that element type."""
    return not path.dtypes or dtype in {str(each).removeprefix("torch.") for each in path.dtypes}


class Selection:
    """Decides for the ranks of one tensor-parallel group; every rank makes one, and asks it for the same things.

    The first question about a shape class exchanges the choices, in milliseconds; later ones are a lookup. A rank that
    does not ask within `timeout_s` makes the others use the reference, and gets that answer itself when it comes.
    `table` is by default the one that ships with tpcompile; without `ask_table` every fast path is wanted that can run.
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
        self._agreed: dict[tuple[str, ShapeClass], Decision] = {}
        members = ranks_text(self._ranks)
        _NUMBERS[members] += 1
        self._store = RankStore.of_job(f"tpcompile/fastpath/{members}/{_NUMBERS[members]}", store)

    def decide(self, name: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, *, variant: str = "") -> Decision:
        """What all ranks run for tensors of these shapes: the fast path `name`, or its reference."""
        shape = ShapeClass.of(shapes, dtype, tp=len(self._ranks), variant=variant)
        if (name, shape) not in self._agreed:
            self._agreed[name, shape] = self._agree(self._chosen(name, shape))
        return self._agreed[name, shape]

    def _chosen(self, name: str, shape: ShapeClass) -> Decision:
        if self._ask_table:
            return choose(name, shape, self._device, self._table)
        return Decision(path=name, shape=shape, is_used=True, why="all fast paths are wanted")

    def _agree(self, chosen: Decision) -> Decision:
        said = Said(decision=chosen, obstacle=obstacle(chosen, self._device), host=_host_of(chosen))
        agreed = self._exchange(said)
        _MADE[chosen.label] = chosen, agreed
        if agreed.is_refused and self._store.rank == min(self._ranks):
            logger.warning("all ranks use the reference of fast path {}: {}", agreed.label, agreed.why)
        return agreed

    def _exchange(self, mine: Said) -> Decision:
        """What the first rank to know it settled: ranks that saw others late must not conclude otherwise."""
        store = self._store.under(mine.decision.label)
        store.put(f"said/{store.rank}", mine.model_dump(mode="json"))
        keys = {rank: f"said/{rank}" for rank in self._ranks}
        found, missing = store.gather(keys, timeout_s=self._timeout_s, stop_at="settled")
        said = {rank: Said.model_validate(value) for rank, value in sorted(found.items())}
        settled = store.put_first("settled", settle(said, missing).model_dump(mode="json"))
        return Decision.model_validate(settled)


def statuses() -> list[tuple[str, str]]:
    """Fast path and shape class -> `used: why`, `refused: why` or `not applicable: why`, of all decisions so far."""
    return [(label, agreed.status) for label, (_, agreed) in _MADE.items()]


def choices() -> dict[str, str]:
    """`choice of PATH for SHAPES` -> what this rank alone chose: equal on ranks with equal tables and devices."""
    return {f"choice of {label}": chosen.says for label, (chosen, _) in _MADE.items()}


@cache
def shipped_table() -> tuple[Ratio, ...]:
    """`ratios.json`, made by `scripts/bench_fastpath.py`; empty without it."""
    if not _TABLE.exists():
        return ()
    return TypeAdapter(tuple[Ratio, ...]).validate_json(_TABLE.read_text())


def _is_about(cell: Ratio, name: str, shape: ShapeClass, device: str) -> bool:
    is_here = (cell.path, cell.device) == (name, device) and cell.tp in (None, shape.tp)
    return is_here and (cell.dtype, cell.widths, cell.variant) == (shape.dtype, shape.widths, shape.variant)


def _distance(cell: Ratio, shape: ShapeClass) -> float:
    return abs(math.log2(max(cell.tokens, 1) / shape.tokens))


def _rounded_up(tokens: int) -> int:
    return 1 << max(tokens - 1, 0).bit_length()


def _capability(device: str) -> int:
    """90 for `sm90`; 0 for a CPU; Triton's interpreter takes any kernel."""
    if device == "interpreter":
        return sys.maxsize
    return int(device.removeprefix("sm")) if device.startswith("sm") else 0


def _absences(missing: Sequence[int]) -> list[str]:
    return [f"{named_ranks(missing)} did not decide in time"] if missing else []


def _obstacles(said: Mapping[int, Said]) -> list[str]:
    unable = [rank for rank, one in said.items() if one.obstacle]
    return [f"{named_ranks(ranks)}: {why}" for why, ranks in grouped(unable, lambda rank: said[rank].obstacle).items()]


def _host_of(decision: Decision) -> str:
    path = registered().get(decision.path) if decision.is_used else None
    return socket.gethostname() if path is not None and path.exchanges else ""


def _distances(said: Mapping[int, Said]) -> list[str]:
    hosts = grouped(said, lambda rank: said[rank].host)
    texts = [f"{named_ranks(ranks)} on {host}" for host, ranks in hosts.items()]
    return [f"its kernels write into the memory of all ranks: {', '.join(texts)}"] if len(texts) > 1 else []


def _differences(said: Mapping[int, Said]) -> list[str]:
    choices = grouped(said, lambda rank: said[rank].decision.says)
    texts = [f"{says} on {named_ranks(ranks)}" for says, ranks in choices.items()]
    return [" / ".join(texts)] if len(texts) > 1 else []
