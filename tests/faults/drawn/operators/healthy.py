"""Healthy things that look like faults; each must stay green."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Operator, Start, Trace
from tests.faults.drawn.template import Insert
from tests.faults.names import Route


def _healthy(name: str, what: str, *edits: Insert) -> Operator:
    return Operator(name=name, what=what, edits=edits, start=Start.STEP, trace=Trace.ABSENT)


OPERATORS = (
    _healthy("unmutated", "the program as it is", Insert("loop", "pass")),
    _healthy(
        "slow_rank",
        "rank R is four seconds late at a step",
        Insert("loop", "if job.rank == $rank and step == $step:\n    time.sleep(4.0)"),
    ),
    _healthy(
        "late_at_first",
        "rank R makes its first call four seconds later",
        Insert("loop", "if job.rank == $rank and step == 0:\n    time.sleep(4.0)"),
    ),
    _healthy(
        "local_evaluation",
        "rank R evaluates a compiled function without collectives from a step on",
        Insert(
            "called",
            """
            if job.rank == $rank and step >= $step:
                torch.compile(perplexity, backend=job.backend)(torch.rand(5, device=job.device))
            """,
        ),
        Insert("file", "def perplexity(losses: torch.Tensor) -> torch.Tensor:\n    return losses.mean().exp()\n"),
    ),
    _healthy(
        "local_logging",
        "rank R logs a number between the calls",
        Insert(
            "called",
            """
            if job.rank == $rank:
                logging.getLogger("train").warning("step %d at %.3f", step, time.perf_counter())
                print("mean of the batch", torch.ones(2).mean().item())
            """,
        ),
    ),
    Operator(
        name="same_break",
        what="all ranks break their graph in the same place",
        edits=(Insert("region", 'print("mean", $x.mean())'),),
        start=Start.STEP,
        trace=Trace.ABSENT,
        not_asked=(Route.CHECK_RANKS,),  # one graph, without breaks, is what it asks for
    ),
    _healthy(
        "same_recompile",
        "all ranks get a smaller batch from a step on",
        Insert("loop", "if step >= $step:\n    $batch = $batch[:-1]"),
    ),
    _healthy(
        "order_of_compiles",
        "rank R compiles two functions without collectives in opposite order",
        Insert(
            "loop",
            """
            parts = [torch.compile(part, backend=job.backend) for part in (first_part, second_part)]
            for part in reversed(parts) if job.rank == $rank else parts:
                part(torch.ones(4, device=job.device))
            """,
        ),
        Insert(
            "file",
            """
            def first_part(x: torch.Tensor) -> torch.Tensor:
                return x.sin() + 1


            def second_part(x: torch.Tensor) -> torch.Tensor:
                return x.cos() - 1
            """,
        ),
    ),
    _healthy(
        "two_of_one_name",
        "two compiled functions of one name in one file; rank R calls the second one alone",
        Insert(
            "called",
            """
            scorers[0](torch.ones(6, device=job.device))
            if job.rank == $rank and step >= $step:
                scorers[1](torch.ones(7, device=job.device))
            """,
        ),
        Insert(
            "setup",
            "scorers = [torch.compile(make(), backend=job.backend) for make in (mean_scorer, peak_scorer)]",
        ),
        Insert(
            "file",
            """
            def mean_scorer():  # type: ignore[no-untyped-def]
                def score(x: torch.Tensor) -> torch.Tensor:
                    return x.mean() * 2

                return score


            def peak_scorer():  # type: ignore[no-untyped-def]
                def score(x: torch.Tensor) -> torch.Tensor:
                    return x.amax() + 2

                return score
            """,
        ),
    ),
    _healthy(
        "rank_in_a_buffer",
        "the rank is tensor data: a buffer that the region reads",
        Insert("region", "$x = $x * $module.place"),
        Insert(
            "built",
            """
            for part in list($model.modules()):
                part.register_buffer("place", torch.tensor(1.0 + job.rank, device=job.device), persistent=False)
            """,
        ),
    ),
    _healthy(
        "checkpoint_on_one_rank",
        "rank R writes its state to a file at a step",
        Insert(
            "called",
            """
            if job.rank == $rank and step == $step:
                torch.save(frame.local_state($model), job.out / "state.pt")
            """,
        ),
    ),
    _healthy(
        "all_skip",
        "all ranks skip a batch",
        Insert("loop", "if step == $step:\n    continue"),
    ),
)
