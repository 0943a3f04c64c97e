"""Operators on what a rank runs: calls left out or added, and collectives outside of what is compiled."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Operator, Start, Trace, causes
from tests.faults.drawn.template import Insert

_OUTSIDE = causes("stuck_collective", "extra_collective")


def _at_step(place: str, *lines: str) -> Insert:
    body = "".join(f"\n    {line}  # fault" for line in lines)
    return Insert(place, f"if job.rank == $rank and step == $step:{body}")


OPERATORS = (
    Operator(
        name="skipped_batch",
        what="rank R skips a batch",
        edits=(_at_step("loop", "continue"),),
        variants=((Insert("loop", "if job.rank == $rank and step == $step:  # fault\n    continue  # fault"),),),
        causes=causes("call_count"),
        tags=("call", "entered"),
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="extra_call",
        what="rank R makes one additional call of the compiled model",
        edits=(_at_step("called", "$again"),),
        causes=causes("call_count"),
        tags=("call", "entered"),
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="left_early",
        what="rank R leaves its loop",
        edits=(_at_step("loop", "break"),),
        causes=causes("call_count", "left_early", "stuck_collective"),
        tags=("call", "entered"),
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="skipped_backward",
        what="rank R finds its loss not finite and skips backward and optimizer",
        edits=(
            _at_step("called", "$loss = $loss * float('inf')"),
            Insert("called", "if not torch.isfinite($loss):  # fault\n    continue  # fault"),
        ),
        causes=causes("call_count", "stuck_collective"),
        tags=("call", "entered", "backward"),
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="gradient_hook",
        what="a parameter of rank R has a gradient hook with a collective, from a step on",
        edits=(
            Insert(
                "called",
                """
                def summed(grad: torch.Tensor) -> None:
                    dist.all_reduce(torch.zeros(1, device=job.device), group=job.group)  # fault

                if job.rank == $rank and step == $step and $loss.requires_grad:
                    next($model.parameters()).register_hook(summed)  # fault
                """,
            ),
        ),
        causes=_OUTSIDE,
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="eager_collective",
        what="rank R sums a metric over the ranks",
        edits=(_at_step("loop", "dist.all_reduce(torch.ones(3, device=job.device), group=job.group)"),),
        variants=(
            (_at_step("called", "dist.broadcast(torch.ones(5, device=job.device), 0)"),),
            (
                Insert(
                    "called",
                    """
                    if job.rank == $rank and step == $step:
                        metric = torch.ones(2, device=job.device)
                        metrics = [torch.empty_like(metric) for _ in range(job.tp)]
                        dist.all_gather(metrics, metric, group=job.group)  # fault
                    """,
                ),
            ),
        ),
        causes=_OUTSIDE,
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="barrier",
        what="rank R enters a barrier",
        edits=(_at_step("loop", "dist.barrier(group=job.group)"),),
        variants=((_at_step("called", "dist.barrier()"),),),
        causes=_OUTSIDE,
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="missing_eager_collective",
        what="rank R leaves out the sum of a metric that the others take",
        edits=(
            Insert(
                "loop",
                """
                if job.rank != $rank or step != $step:  # fault
                    dist.all_reduce(torch.ones(3, device=job.device), group=job.group)  # fault
                """,
            ),
        ),
        causes=_OUTSIDE,
        tags=("call",),
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
    Operator(
        name="extra_compile",
        what="rank R compiles and runs a second function with a collective",
        edits=(
            Insert(
                "called",
                """
                if job.rank == $rank and step == $step:
                    probe = torch.compile(spread, backend=job.backend)  # fault
                    probe(torch.ones(4, device=job.device), job.group)  # fault
                """,
            ),
            Insert(
                "file",
                """
                def spread(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # fault
                    return x - funcol.all_reduce(x, "avg", group)  # fault
                """,
            ),
        ),
        causes=causes("extra_compile"),
        start=Start.STEP,
    ),
)
