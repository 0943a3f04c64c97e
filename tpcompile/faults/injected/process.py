"""Faults of the process: a rank that dies, never arrives, or does not compile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tpcompile.faults.injected.fault import Fault, FaultContext


def _killed(phase: str, context: FaultContext) -> None:
    if phase == "compiling" and context.is_target:
        os.kill(os.getpid(), signal.SIGKILL)


def _never_starts(phase: str, context: FaultContext) -> None:
    if phase == "start" and context.is_target:
        time.sleep(86400)


def _never_arrives(phase: str, context: FaultContext) -> None:
    if phase == "C/first" and context.is_target:
        time.sleep(86400)


def _raises(phase: str, context: FaultContext) -> None:
    if phase == "C/steady" and context.is_target:
        raise RuntimeError("injected: this rank gives up")


def _not_compiled(program: Any, context: FaultContext, compile_: Callable[[Any], Any]) -> Any:
    return program


def _compiled_on_target(program: Any, context: FaultContext, compile_: Callable[[Any], Any]) -> Any:
    return compile_(program) if context.is_target else program


FAULTS = (
    Fault("killed", "one rank is killed while it compiles", phase=_killed),
    Fault("never_starts", "one rank never joins the process group", phase=_never_starts),
    Fault("never_arrives", "one rank never reaches the first call", phase=_never_arrives),
    Fault("raises", "one rank raises between calls", phase=_raises),
    Fault("nothing_compiled", "the program is not compiled on any rank", compile=_not_compiled),
    Fault("one_rank_compiles", "the program is compiled on one rank only", compile=_compiled_on_target),
)
