"""Calls of a program whose kernels are chosen by time -> the same kernels on all ranks, by the times of the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tpcompile.profiles.agreement import Agreement
from tpcompile.torch_api.autotuning import shared_timings


class Tuned:
    """Compiles and calls a program that was compiled with the options of `tpcompile.profiles.TUNED`.

    Ranks compile the same graphs, so they ask for the same times in the same order; a rank that asks for others is
    named. In a process alone, `agreement` is None.
    """

    def __init__(self, program: Callable[..., Any], agreement: Agreement | None) -> None:
        self._program, self._agreement = program, agreement
        self.num_shared = 0
        """Choices that were made so far."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns."""
        with shared_timings(self._share):
            return self._program(*args, **kwargs)

    def _share(self, what: str, candidates: Sequence[str], times: Callable[[], list[float]]) -> list[float]:
        self.num_shared += 1
        if self._agreement is None:
            return times()
        asked = f"{what}: {', '.join(candidates)}"
        return self._agreement.of_first_rank(f"choice {self.num_shared}", asked, times, list[float])
