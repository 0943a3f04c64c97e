"""Proof that torch.compile gave every tensor-parallel rank the same one graph.

capture, check   a program of your own: record what each rank compiles, compare the ranks
Target           a program of your own for `tpcompile gate --target`
Sentinel         the watch over a running job
preflight        the handshake before the first compile
run              a compiled program under an execution profile: as it is, or as one CUDA graph
collectives      collectives with a stated gradient, equal in eager and compiled
nn               the tensor-parallel block the gate compiles, and its parts
typecheck        what is replicated, sharded and partial in a module, without ranks; `tpcompile typecheck`
testing          a module of your own against itself on one device; ranks for tests
Verdict          what ranks were compared in, and the cause where they differ; also that of a verdict.json
DivergenceError  what a red verdict raises

    with tpcompile.capture(mesh) as run:  # on every rank, after init_process_group
        train_step(batch)
    verdict = tpcompile.check(run)
    verdict.print()
    verdict.raise_for_status()

Importing this module imports neither torch nor any of these: each is imported when it is used. Nothing is logged until
a program says `loguru.logger.enable("tpcompile")`; warnings of the sentinel are written to stderr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from loguru import logger

from tpcompile.version import __version__ as __version__

if TYPE_CHECKING:
    from tpcompile import collectives, nn, preflight, testing, typecheck
    from tpcompile.checking import capture, check
    from tpcompile.errors import DivergenceError
    from tpcompile.evidence.records import Verdict
    from tpcompile.profiles import run
    from tpcompile.sentinel import Sentinel
    from tpcompile.target import Target

__all__ = [
    "DivergenceError", "Sentinel", "Target", "Verdict", "capture", "check", "collectives", "nn", "preflight", "run",
    "testing", "typecheck",
]  # fmt: skip

_HOMES = {
    "DivergenceError": "tpcompile.errors",
    "Sentinel": "tpcompile.sentinel",
    "Target": "tpcompile.target",
    "Verdict": "tpcompile.evidence.records",
    "capture": "tpcompile.checking",
    "check": "tpcompile.checking",
    "run": "tpcompile.profiles",
}
"""Name -> the module that has it; the other names are modules."""

logger.disable("tpcompile")


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
