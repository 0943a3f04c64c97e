"""A target, built and run on all ranks and on one device -> whether all that the ranks return and train is right.

Every parameter gets equal numbers in both; how the ranks hold it follows from the shapes, or from what modules declare.
Where shapes leave it open, the layout counts with which the ranks are right. It is judged by numbers alone: there is no
rule for any op, and nothing has to be followed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpcompile.numerics.trace import Trace
from tpcompile.ranks.children import as_they_end
from tpcompile.typecheck.assembly import possible
from tpcompile.typecheck.beside_one import Expected, judged_beside, traced_run
from tpcompile.typecheck.layouts import Layouts, layouts_of
from tpcompile.typecheck.program import Build, Description, Mode, NotComparable, Place, Program, Run
from tpcompile.typecheck.report import Numbers

_TIMEOUT_S = 60.0
_PATIENCE_S = 20.0
"""Seconds after which a program that raised is not run in a different way."""
_MOST_NUMBERS = 20_000_000
"""Parameters of a program that is run, on one device."""
_MOST_OF_REASON = 160
"""Letters of what a program raised."""
_Key = TypeVar("_Key", str, int)


def compare_numbers(build: Build, *, size: int, train: bool, expected: Expected) -> Numbers:
    """Run the program of `build` on `size` ranks and on one device, in forked processes, and compare.

    In float64 where the program allows it. What cannot be compared is said in `why_not`.
    """
    if sys.platform != "linux":
        return Numbers(why_not="processes cannot be forked here")
    with tempfile.TemporaryDirectory(prefix="tpcompile-numbers-") as folder:
        why = ""
        start = time.monotonic()
        for number, attempt in enumerate(_ATTEMPTS):
            if time.monotonic() - start > _PATIENCE_S:
                break  # its ranks wait for each other, or it is large
            trial = _Trial(build, size, attempt if train else replace(attempt, grads=False), Path(folder) / str(number))
            try:
                return trial.judged(expected)
            except NotComparable as error:
                return Numbers(why_not=str(error))
            except ForkError as error:
                _, is_settled, text = str(error).partition(f"{NotComparable.__name__}: ")
                if is_settled:  # a child said so
                    return Numbers(why_not=text)
                why = why or shorten(str(error), _MOST_OF_REASON, placeholder=" ...")
    return Numbers(why_not=why)


@dataclass(frozen=True)
class _Attempt:
    """How a program is run."""

    dtype: torch.dtype | None = torch.float64
    grads: bool = True
    hidden: bool = True
    """With gradients of inputs that do not require them, too."""


_ATTEMPTS = (_Attempt(), _Attempt(hidden=False), _Attempt(None, hidden=False), _Attempt(grads=False, hidden=False))
"""In this order: the next where a program raises."""


@dataclass(frozen=True)
class _Trial:
    """A program that is to be run once by each rank and by one device."""

    build: Build
    size: int
    how: _Attempt
    folder: Path

    def judged(self, expected: Expected) -> Numbers:
        """The ranks beside one device. Raises NotComparable, and ForkError where a process fails."""
        self.folder.mkdir()
        *ranks, one, reseeded = self._described()
        if sum(known.numel for known in one.parameters.values()) > _MOST_NUMBERS:
            raise NotComparable("the program is large")
        if not one.mode:
            raise NotComparable("two runs with different seeds differ, in eval mode, too")
        layouts = layouts_of(ranks, one, expected.parameter_types)
        given = _Given.of(ranks, one, reseeded)

        def of_rank(rank: int) -> tuple[Run, Trace]:
            program = self._set_up(self._place(rank, "run"), one)
            program.load(layouts.parts(rank))
            program.load_buffers(given.buffers[rank])
            program.give(given.inputs[rank])
            return traced_run(program, grads=self.how.grads)

        def of_reseeded() -> Run:
            """The run of one device that was built with a different seed, on the numbers of the first."""
            program = self._set_up(self._alone("again"), one, seed=1)
            program.load(layouts.values)
            program.load_buffers(one.buffers)
            program.give({place: leaf for place, leaf in enumerate(one.inputs) if isinstance(leaf, Tensor)})
            program.reset()
            return program.run()

        calls = [partial(of_rank, rank) for rank in range(self.size)]
        *runs, other = run_forked([*calls, of_reseeded], timeout_s=_TIMEOUT_S)

        def beside_one() -> Numbers:
            program = self._set_up(self._alone("judge"), one)
            _check_reseeded(program, layouts, other)
            return judged_beside(program, layouts, runs, expected, grads=self.how.grads)

        found: Numbers = run_forked([beside_one], timeout_s=_TIMEOUT_S)[0]
        return found

    def _described(self) -> list[Description]:
        """By each rank, and twice by one device, with different seeds."""

        def described(place: Place, *, seed: int = 0, runs: bool = False) -> Description:
            return Program(self.build, place, seed=seed).described(runs=runs)

        ranks = [partial(described, self._place(rank)) for rank in range(self.size)]
        alone = partial(described, self._alone("one"), runs=True)
        reseeded = partial(described, self._alone("reseeded"), seed=1)
        return run_forked([*ranks, alone, reseeded], timeout_s=_TIMEOUT_S)

    def _set_up(self, place: Place, one: Description, *, seed: int = 0) -> Program:
        program = Program(self.build, place, seed=seed)
        program.enter(one.mode or Mode.STEADY)
        if self.how.grads and self.how.hidden:
            program.train_inputs(one.hidden)
        return program

    def _place(self, rank: int, what: str = "describe") -> Place:
        return Place(rank, self.size, self.folder / what, self.how.dtype)

    def _alone(self, what: str) -> Place:
        return Place(0, 1, self.folder / what, self.how.dtype)


def _check_reseeded(program: Program, layouts: Layouts, other: Run) -> None:
    """Raises NotComparable where two builds with different seeds differ in more than they could be given."""
    program.load(layouts.values)
    program.reset()
    own = program.run()
    if not own.outputs:
        raise NotComparable("the program returns no tensor")
    same = [torch.equal(output, other.outputs[name]) for name, output in own.outputs.items()]
    if not all(same):
        raise NotComparable("the program holds random numbers that are neither parameters, buffers nor inputs")


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


class ForkError(Exception):
    """A process raised, was killed, or did not end in time."""


def run_forked(functions: Sequence[Callable[[], Any]], *, timeout_s: float) -> list[Any]:
    """What the functions return, in their order, each from a forked process; all run at the same time.

    Raises ForkError for the first that failed; no process is left then.
    """
    calls = [partial(_quiet, function) for function in functions]
    found: dict[int, Any] = {}
    with closing(as_they_end(calls, jobs=len(calls), cpu_s=timeout_s, clock_s=timeout_s)) as children:
        for number, ended in children:
            if ended.failure:
                raise ForkError(ended.failure)
            found[number] = ended.result
    return [found[number] for number in sorted(found)]


def _quiet(function: Callable[[], Any]) -> Any:
    """What the program prints, the check of its types has let it print already.

    A process with threads may fork where the child starts none: torch gets one here, as in a DataLoader's workers.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    return function()


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
