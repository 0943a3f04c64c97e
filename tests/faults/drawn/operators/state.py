"""Operators on the state of a rank's process, of its modules and of its globals."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Blame, Operator, Start, Trace, causes
from tests.faults.drawn.template import Insert

_CALL = ("call", "entered")


def _state(name: str, text: str, *specific: str, what: str) -> list[Operator]:
    """A process state that rank R sets before its first call, and one that it sets at a step."""
    accepted = causes("environment", "process_state", *specific)
    at_first = Operator(
        name=f"{name}_at_first",
        what=f"{what}, before the first call",
        edits=(Insert("loop", f"if job.rank == $rank and step == 0:\n    {text}  # fault"),),
        causes=accepted,
        blame=Blame.DIFFER,
        tags=_CALL,
    )
    at_step = Operator(
        name=name,
        what=f"{what}, at a step",
        edits=(Insert("loop", f"if job.rank == $rank and step == $step:\n    {text}  # fault"),),
        causes=accepted,
        start=Start.STEP,
        tags=_CALL,
    )
    return [at_first, at_step]


def _member(value: str) -> Insert:
    return Insert("built", f"for part in $model.modules():\n    part.strength = {value}")


OPERATORS = (
    *_state(
        "autocast",
        "torch.set_autocast_enabled(job.device.type, True)",
        "autocast",
        what="rank R switches autocast on",
    ),
    *_state(
        "matmul_precision",
        'torch.set_float32_matmul_precision("high")',
        "matmul_precision",
        "allow_tf32",
        what="rank R lowers the precision of matmuls",
    ),
    *_state("num_threads", "torch.set_num_threads(2)", "num_threads", what="rank R changes its number of threads"),
    *_state(
        "deterministic",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "deterministic",
        what="rank R asks for deterministic algorithms",
    ),
    *_state("grad_mode", "frame.flip_grad_mode()", "grad_mode", "requires_grad", what="rank R flips the grad mode"),
    *_state(
        "default_dtype",
        "torch.set_default_dtype(torch.float64)",
        "default_dtype",
        what="rank R changes the default dtype",
    ),
    Operator(
        name="attribute_changes",
        what="an attribute that the region reads changes on rank R at a step",
        edits=(
            Insert("region", "$x = $x * $module.strength  # fault"),
            _member("0.5"),
            Insert(
                "loop",
                """
                if job.rank == $rank and step == $step:
                    for part in $model.modules():
                        part.strength = 0.25  # fault
                """,
            ),
        ),
        causes=causes("python_value"),
        start=Start.STEP,
    ),
    Operator(
        name="global_changes",
        what="a global that the region reads changes on rank R at a step",
        edits=(
            Insert("region", "$x = $x * SETTINGS.strength  # fault"),
            # Of an object: torch 2.11 guards no attribute of a class.
            Insert("file", "SETTINGS = types.SimpleNamespace(strength=0.5)"),
            Insert("loop", "if job.rank == $rank and step == $step:\n    SETTINGS.strength = 0.25  # fault"),
        ),
        causes=causes("python_value"),
        start=Start.STEP,
    ),
    Operator(
        name="verbose_later",
        what="a flag changes on rank R at a step, and the region prints from then on",
        edits=(
            Insert(
                "region",
                """
                if $module.verbose:  # fault
                    print("mean", $x.mean())  # fault
                """,
            ),
            Insert("built", "for part in $model.modules():\n    part.verbose = False"),
            Insert(
                "loop",
                """
                if job.rank == $rank and step == $step:
                    for part in $model.modules():
                        part.verbose = True  # fault
                """,
            ),
        ),
        causes=causes("python_value", "graph_break"),
        start=Start.STEP,
    ),
    Operator(
        name="new_collective_later",
        what="a flag changes on rank R at a step, and the region has a collective more from then on",
        edits=(
            Insert(
                "region",
                """
                if $module.monitored:  # fault
                    $x = $x + 0.0 * funcol.all_reduce($x.detach(), "sum", $group)  # fault
                """,
            ),
            Insert("built", "for part in $model.modules():\n    part.monitored = False"),
            Insert(
                "loop",
                """
                if job.rank == $rank and step == $step:
                    for part in $model.modules():
                        part.monitored = True  # fault
                """,
            ),
        ),
        causes=causes("python_value", "extra_collective"),
        start=Start.STEP,
    ),
    Operator(
        name="wrong_variant",
        what="rank R runs a different compiled variant at a step; both variants were compiled before",
        edits=(
            Insert("region", "$x = $x * 2.0 if MODE[0] else $x  # fault"),
            Insert("file", "MODE = [False]"),
            Insert("loop", "MODE[0] = step == 1 or (job.rank == $rank and step == $step)  # fault"),
        ),
        causes=causes("wrong_variant", "cached_variant"),
        tags=("call",),
        start=Start.STEP,
        trace=Trace.ABSENT,
    ),
)
