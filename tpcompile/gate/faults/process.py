"""Faults of the process: a rank that dies, never arrives, does not compile, or runs it differently."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tpcompile.by_size import Table
from tpcompile.by_size.table import Cell, Row
from tpcompile.choices import AllReduce, Profile
from tpcompile.gate.faults.fault import FaultContext, injects


@injects("phase")
def killed(phase: str, context: FaultContext) -> None:
    """One rank is killed while it compiles."""
    if phase == "compiling" and context.is_target:
        os.kill(os.getpid(), signal.SIGKILL)


@injects("phase")
def never_starts(phase: str, context: FaultContext) -> None:
    """One rank never joins the process group."""
    if phase == "start" and context.is_target:
        time.sleep(86400)


@injects("phase")
def never_arrives(phase: str, context: FaultContext) -> None:
    """One rank never reaches the first call."""
    if phase == "C/first" and context.is_target:
        time.sleep(86400)


@injects("phase")
def raises(phase: str, context: FaultContext) -> None:
    """One rank raises between calls."""
    if phase == "C/steady" and context.is_target:
        raise RuntimeError("injected: this rank gives up")


@injects("profile")
def other_profile(profile: Profile, context: FaultContext) -> Profile:
    """One rank runs under a different execution profile."""
    if not context.is_target:
        return profile
    return "default" if profile == "measured" else "measured"


@injects("all_reduce")
def other_all_reduce(all_reduce: AllReduce, context: FaultContext) -> AllReduce:
    """One rank sums by size where the others use NCCL, or the other way round."""
    if not context.is_target:
        return all_reduce
    return "nccl" if all_reduce == "by_size" else "by_size"


@injects("all_reduce")
def other_table(all_reduce: AllReduce, context: FaultContext) -> AllReduce | Table:
    """All ranks sum by size, one with a different table."""
    if not context.is_target:
        return "by_size"
    return Table(cells=(Cell(gpu="injected", num_ranks=2, rows=(Row(up_to_bytes=4096, algorithm="one_shot"),)),))


@injects("compile")
def nothing_compiled(program: Any, context: FaultContext, compile_: Callable[[Any], Any]) -> Any:
    """The program is not compiled on any rank."""
    return program


@injects("compile")
def one_rank_compiles(program: Any, context: FaultContext, compile_: Callable[[Any], Any]) -> Any:
    """The program is compiled on one rank only."""
    return compile_(program) if context.is_target else program
