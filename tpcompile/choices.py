"""Values that a flag and the configuration that it sets share; no torch, no pydantic: `tpcompile --help` imports it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Mode = Literal["A", "B", "C"]
"""How collectives are issued inside the compiled region, see repro/tp_compile_repro.py."""
TARGET: Literal["target"] = "target"
"""Stands for a mode where the gate runs a program of the user's own."""
AnyMode = Literal["A", "B", "C", "target"]
Profile = Literal["default", "graphed", "max-autotune", "measured"]
"""How a compiled callable is run, see `tpcompile.profiles`."""
AllReduce = Literal["nccl", "by_size"]
"""How compiled graphs sum over ranks, see `tpcompile.by_size`."""
SUMMED_RANKS = (2, 4, 8)
"""Sizes of a group for which torch's kernels for symmetric memory give all ranks the same bits."""
ALL_MODES: tuple[Mode, ...] = ("A", "B", "C")
"""What `--mode all` runs, in this order."""
Device = Literal["auto", "cpu", "cuda", "one_gpu"]
"""`auto` is CUDA when there is a GPU for every local rank; with `one_gpu` all ranks share one, through gloo."""


def phases_of(modes: Iterable[AnyMode]) -> tuple[str, ...]:
    """The phases of a run of the gate, in order; a run may leave some out."""
    return ("start", *(phase for mode in modes for phase in _PHASES[mode]), "verdict")


_PHASES: dict[AnyMode, tuple[str, ...]] = {
    "A": ("A/eager", "A/first", "A/count", "A/steady"),
    "B": ("B/first", "B/steady", "B/gradient"),
    "C": ("C/first", "C/steady", "C/resized", "C/eager"),
    TARGET: ("target/build", "target/first", "target/steady", "target/resized", "target/eager"),
}
