"""Table of measurements -> what one rank chooses for a shape class: a fast path or its reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.reader import read_json, validated

MIN_RATIO = 1.03
"""Smallest ratio at which a fast path is used: cells that were measured twice differ by up to 3 %."""
_TABLE = Path(__file__).with_name("ratios.json")
_MAX_FACTOR = 4
"""A ratio holds for a shape class if it was measured at no more than this many times more or fewer tokens."""


class Ratio(Frozen):
    """One measured cell of `ratios.json`."""

    path: str
    gpu: str
    """Model, as the driver names it: `NVIDIA H200`."""
    dtype: str
    tp: int | None
    """None when the tensors do not depend on it."""
    tokens: int
    widths: tuple[int, ...]
    """Sizes of the last dims of the tensors."""
    variant: str = ""
    ratio_to_inductor: float
    """Time of Inductor's code for the reference, divided by that of the fast path: above 1 the fast path is faster.

    For a fast path that exchanges with its peers, the reference is the best form with a collective.
    """
    quartiles: tuple[float, float] | None = None
    """Quartiles of the ratio over rounds; None in cells that were measured before they were kept."""
    num_programs: int | None = None
    """Most multiprocessors filled by kernels that wait for each other; None for kernels that do not wait."""
    us: dict[str, float] = {}
    """Time of one call in microseconds, by `inductor` and `fast path`."""
    regions: dict[str, float] = {}
    """Compiled regions that one call enters, by `inductor` and `fast path`."""
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
    """Options that change the speed: `interleaved`, `train`, `interleaved, train`."""

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtype: torch.dtype, *, tp: int, variant: str = "") -> ShapeClass:
        """The class of these tensors, [..., width] each; the first has all tokens."""
        num_tokens = math.prod(shapes[0][:-1])
        tokens = 1 << max(num_tokens - 1, 0).bit_length()
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
    num_programs: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    """Multiprocessors that kernels which wait for each other may fill, on every rank. None for kernels that do not
    wait, and in the choice of a rank without a measurement: the GPUs then set the limit."""
    why: str
    is_refused: bool = False
    """True when a rank chose the fast path, and not all ranks can use it."""

    @property
    def label(self) -> str:
        """Fast path and shape class."""
        return f"{self.path} for {self.shape}"

    @property
    def says(self) -> str:
        """`used`, `used with num_programs=24`, or `reference (why)`."""
        if not self.is_used:
            return f"reference ({self.why})"
        return "used" if self.num_programs is None else f"used with num_programs={self.num_programs}"

    @property
    def status(self) -> str:
        """`used: why`, `refused: why` or `not applicable: why`, for the report."""
        unused = "refused" if self.is_refused else "not applicable"
        return f"{'used' if self.is_used else unused}: {self.why}"


def choose(name: str, shape: ShapeClass, gpu: str, table: Iterable[Ratio]) -> Decision:
    """The fast path where it was measured to beat Inductor's code on this model of GPU and shape class."""
    near: list[tuple[float, float, Ratio]] = []
    wanted = (name, gpu, shape.dtype, shape.widths, shape.variant)
    for cell in table:
        is_about_it = (cell.path, cell.gpu, cell.dtype, cell.widths, cell.variant) == wanted
        distance = abs(math.log2(max(cell.tokens, 1) / shape.tokens))
        if is_about_it and cell.tp in (None, shape.tp) and distance <= math.log2(_MAX_FACTOR):
            near.append((distance, cell.ratio_to_inductor, cell))
    if not near:
        return Decision(path=name, shape=shape, why=f"not measured on {gpu} for this shape class")
    nearest = min(near, key=lambda found: found[:2])[-1]
    why = f"{nearest.ratio_to_inductor:.2f} times the speed of Inductor's code at {nearest.tokens} tokens on {gpu}"
    if nearest.ratio_to_inductor < MIN_RATIO:
        return Decision(path=name, shape=shape, why=f"{why}; at least {MIN_RATIO} is required")
    return Decision(path=name, shape=shape, is_used=True, num_programs=nearest.num_programs, why=why)


@cache
def shipped_table() -> tuple[Ratio, ...]:
    """`ratios.json`, made by `scripts/bench_fastpath.py`; empty without it."""
    return read_table(_TABLE)


def read_table(path: Path) -> tuple[Ratio, ...]:
    """Cells of a file; empty when the file does not exist."""
    try:
        return validated(tuple[Ratio, ...], read_json(path), path)
    except FileNotFoundError:
        return ()


def write_table(cells: Iterable[Ratio], path: Path) -> None:
    """Write cells to a file, without the fields that are None."""
    lines = [cell.model_dump_json(exclude_defaults=True) for cell in cells]
    path.write_text("[\n " + ",\n ".join(lines) + "\n]\n")
