"""Operators on the process of a rank: killed, stopped, raising, or never coming."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Operator, Start, Trace, causes
from tests.faults.drawn.template import Insert


def _at_step(place: str, line: str) -> Insert:
    return Insert(place, f"if job.rank == $rank and step == $step:\n    {line}  # fault")


OPERATORS = (
    Operator(
        name="killed",
        what="rank R is killed",
        edits=(_at_step("loop", "os.kill(os.getpid(), signal.SIGKILL)"),),
        variants=((_at_step("called", "os.kill(os.getpid(), signal.SIGKILL)"),),),
        causes=causes("killed"),
        has_line=False,
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="stopped",
        what="rank R is stopped (SIGSTOP) and never continued",
        edits=(_at_step("loop", "os.kill(os.getpid(), signal.SIGSTOP)"),),
        variants=((_at_step("called", "os.kill(os.getpid(), signal.SIGSTOP)"),),),
        causes=causes("stopped_responding"),
        has_line=False,
        start=Start.STEP,
        trace=Trace.ABSENT,
        options={"stopped_s": 4.0, "unresponsive_s": 4.0},
    ),
    Operator(
        name="raised",
        what="rank R raises between two calls",
        edits=(_at_step("loop", 'raise FileNotFoundError("shard-00017.bin")'),),
        variants=(
            (_at_step("called", 'raise torch.OutOfMemoryError("tried to allocate 2 GiB")'),),
            (_at_step("called", 'raise ConnectionResetError("connection to the storage was lost")'),),
        ),
        causes=causes("raised"),
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="never_arrives",
        what="rank R waits forever for its data; skew_limit_s is 4 s",
        edits=(_at_step("loop", "time.sleep(3600.0)"),),
        causes=causes("never_arrived"),
        start=Start.STEP,
        trace=Trace.ABSENT,
        options={"skew_limit_s": 4.0},
    ),
)
