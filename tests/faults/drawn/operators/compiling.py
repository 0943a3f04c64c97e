"""Operators on how a rank compiles."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Blame, Operator, causes
from tests.faults.drawn.template import Insert, Rewrite

_BROKEN_COMPILER = Insert(
    "file",
    """
    def broken(graph, inputs):  # type: ignore[no-untyped-def]
        raise ImportError("libgomp.so.1: cannot open shared object file")  # fault
    """,
)
_BROKEN_BACKEND = Rewrite("compile", "backend=job.backend", "backend=broken if job.rank == $rank else job.backend")
_REGION = ("call", "entered", "compile")

OPERATORS = (
    Operator(
        name="backend_differs",
        what="rank R compiles with a different backend",
        edits=(Rewrite("compile", "backend=job.backend", 'backend="eager" if job.rank == $rank else job.backend'),),
        causes=causes("backend", "backend_differs"),
        blame=Blame.DIFFER,
        tags=_REGION,
        backends=("aot_eager", "inductor"),
    ),
    Operator(
        name="not_compiled",
        what="rank R does not compile",
        edits=(Rewrite("compile", "backend=job.backend", "backend=job.backend, disable=job.rank == $rank"),),
        causes=causes("compile_disabled"),
        blame=Blame.DIFFER,
        leaves_no_log=True,
        tags=_REGION,
    ),
    Operator(
        name="layer_disabled",
        what="rank R leaves a layer out of the compiled region",
        edits=(
            Insert(
                "built",
                """
                if job.rank == $rank:
                    $layers[1].forward = torch.compiler.disable($layers[1].forward)  # fault
                """,
            ),
        ),
        causes=causes("graph_break", "compile_disabled"),
        blame=Blame.DIFFER,
        tags=_REGION,
        is_where_layers_are_called=True,
    ),
    Operator(
        name="regional_compile",
        what="rank R compiles layer by layer, the others the whole model",
        edits=(
            Insert(
                "compiled",
                """
                if job.rank == $rank:
                    for layer in $layers:
                        layer.compile(backend=job.backend)  # fault
                    compiled = $model  # fault
                """,
            ),
        ),
        # Where the first collective is not in a layer, the others wait in the region that this rank runs eager.
        causes=causes("regional_compile", "compile_disabled"),
        blame=Blame.DIFFER,
        tags=_REGION,
    ),
    Operator(
        name="dynamic_differs",
        what="rank R compiles with dynamic=True",
        edits=(
            Rewrite(
                "compile", "backend=job.backend", "backend=job.backend, dynamic=True if job.rank == $rank else None"
            ),
        ),
        causes=causes("automatic_dynamic", "dynamic_mark", "compile_settings"),
        blame=Blame.DIFFER,
        tags=_REGION,
    ),
    Operator(
        name="recompile_limit",
        what="rank R has a recompile limit of 1, and the batch changes its shape",
        edits=(
            Insert("setup", "if job.rank == $rank:\n    torch._dynamo.config.recompile_limit = 1  # fault"),
            Insert("loop", "if step >= 2:\n    $batch = $batch[:-1]"),
        ),
        causes=causes("recompile_limit"),
        tags=_REGION,
    ),
    Operator(
        name="compile_failed",
        what="the compiler of rank R raises",
        edits=(_BROKEN_BACKEND, _BROKEN_COMPILER),
        causes=causes("compile_failed"),
        tags=_REGION,
    ),
    Operator(
        name="compile_failed_quietly",
        what="the compiler of rank R raises under suppress_errors, and the rank runs eager",
        edits=(
            _BROKEN_BACKEND,
            _BROKEN_COMPILER,
            Insert("setup", "torch._dynamo.config.suppress_errors = True"),
        ),
        causes=causes("compile_failed"),
        tags=_REGION,
    ),
)
