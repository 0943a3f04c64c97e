"""A target, built and run on all ranks and on one device -> whether all that the ranks return and train is right.

Every parameter gets equal numbers in both; how the ranks hold it follows from the shapes, or from what modules declare.
Where shapes leave it open, the layout counts with which the ranks are right. It is judged by numbers alone: there is no
rule for any op, and nothing has to be followed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpcompile.numerics.traced import Trace
from tpcompile.typecheck.assembly import possible
from tpcompile.typecheck.beside_one import Expected, Numbers, judged_beside, traced_run
from tpcompile.typecheck.forks import ForkError, can_fork, run_forked
from tpcompile.typecheck.layouts import Layouts, layouts_of
from tpcompile.typecheck.program import Build, Description, NotComparable, Place, Program, Run

_TIMEOUT_S = 60.0
_MOST_NUMBERS = 20_000_000
"""Parameters of a program that is run, on one device."""
_Key = TypeVar("_Key", str, int)


def compare_numbers(build: Build, *, size: int, train: bool, expected: Expected) -> Numbers:
    """Run the program of `build` on `size` ranks and on one device, in forked processes, and compare.

    In float64 where the program allows it. What cannot be compared is said in `why_not`.
    """
    if not can_fork():
        return Numbers(why_not="processes cannot be forked here")
    with tempfile.TemporaryDirectory(prefix="tpcompile-numbers-") as folder:
        why = ""
        for number, (dtype, grads) in enumerate([(torch.float64, train), (None, train), (torch.float64, False)]):
            trial = _Trial(build, size, dtype, grads, Path(folder) / str(number))
            try:
                return trial.judged(expected)
            except NotComparable as error:
                return Numbers(why_not=str(error))
            except ForkError as error:
                why = why or str(error)
    return Numbers(why_not=why)


@dataclass(frozen=True)
class _Trial:
    """A program that is to be run once by each rank and by one device."""

    build: Build
    size: int
    dtype: torch.dtype | None
    grads: bool
    folder: Path

    def judged(self, expected: Expected) -> Numbers:
        """The ranks beside one device."""
        self.folder.mkdir()
        *ranks, one, reseeded = self._described()
        is_large = sum(known.numel for known in one.parameters.values()) > _MOST_NUMBERS
        if is_large:
            raise NotComparable("the program is large: run `check_numerics` on it")
        layouts = layouts_of(ranks, one, expected.parameter_types)
        given = _Given.of(ranks, one, reseeded)
        train = bool(one.modes & {"train"})
        if not one.modes:
            raise NotComparable("two runs with different seeds differ, also in eval mode")
        run = partial(self._ran, layouts=layouts, given=given, train=train)
        runs = run_forked([partial(run, rank) for rank in range(self.size)], timeout_s=_TIMEOUT_S)
        judge = partial(self._judged_beside_one, layouts, runs, expected, train=train)
        return run_forked([judge], timeout_s=_TIMEOUT_S)[0]

    def _described(self) -> list[Description]:
        """By each rank, and twice by one device, with different seeds."""
        ranks = [partial(self._describe, self._place(rank)) for rank in range(self.size)]
        alone = partial(self._describe, self._alone("one"), modes=True)
        reseeded = partial(self._describe, self._alone("reseeded"), seed=1)
        return run_forked([*ranks, alone, reseeded], timeout_s=_TIMEOUT_S)

    def _describe(self, place: Place, *, seed: int = 0, modes: bool = False) -> Description:
        program = Program(self.build, place, seed=seed)
        return program.described(modes=modes)

    def _ran(self, rank: int, *, layouts: Layouts, given: _Given, train: bool) -> tuple[Run, Trace]:
        program = Program(self.build, self._place(rank, "run"))
        program.module.train(train)
        program.load(layouts.parts(rank))
        program.load_buffers(given.buffers[rank])
        program.give(given.inputs[rank])
        return traced_run(program, grads=self.grads)

    def _judged_beside_one(
        self, layouts: Layouts, runs: Sequence[tuple[Run, Trace]], expected: Expected, *, train: bool
    ) -> Numbers:
        program = Program(self.build, self._alone("judge"))
        program.module.train(train)
        return judged_beside(program, layouts, runs, expected, grads=self.grads)

    def _place(self, rank: int, what: str = "describe") -> Place:
        return Place(rank, self.size, self.folder / what, self.dtype)

    def _alone(self, what: str) -> Place:
        return Place(0, 1, self.folder / what, self.dtype)


@dataclass(frozen=True)
class _Given:
    """What each rank is given of what one device has drawn: what a program computes is its own everywhere."""

    buffers: Sequence[Mapping[str, Tensor]]
    inputs: Sequence[Mapping[int, Tensor]]

    @classmethod
    def of(cls, ranks: Sequence[Description], one: Description, reseeded: Description) -> _Given:
        """What differs between two seeds is drawn."""
        leaves, others = dict(enumerate(one.inputs)), dict(enumerate(reseeded.inputs))
        buffers = {name: each for name, each in one.buffers.items() if _is_drawn(each, reseeded.buffers.get(name))}
        inputs = {place: leaf for place, leaf in leaves.items() if _is_drawn(leaf, others.get(place))}
        return cls(
            _parts_of(buffers, [each.buffers for each in ranks]),
            _parts_of(inputs, [dict(enumerate(each.inputs)) for each in ranks]),
        )


def _is_drawn(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return False
    return value.shape != other.shape or not torch.equal(value, other)


def _parts_of(drawn: Mapping[_Key, Tensor], ranks: Sequence[Mapping[_Key, Any]]) -> list[dict[_Key, Tensor]]:
    """Of each rank, its part of what one device has drawn."""
    found: list[dict[_Key, Tensor]] = [{} for _ in ranks]
    for key, full in drawn.items():
        parts = [each.get(key) for each in ranks]
        ways = possible(tuple(full.shape), [tuple(part.shape) for part in parts if part is not None])
        if not ways or any(part is None for part in parts):
            raise NotComparable(f"buffer or input {key} is not a part of the one that one device has")
        for rank in range(len(ranks)):
            found[rank][key] = ways[0].part(full, rank)
    return found
