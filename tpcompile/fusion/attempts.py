"""`package.module:build` -> the program compiled as it is, and with each kind of op taken out of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpcompile.errors import ConfigError
from tpcompile.fusion.bisect import Attempt, Bisection, Kind, TakenOut, has_dynamic_shapes, totals
from tpcompile.fusion.records import Manifest
from tpcompile.fusion.targets import Variant
from tpcompile.torch_api import rewrites
from tpcompile.torch_api.rewrites import Rewrite, RewritingPass

_REWRITES: dict[Kind, Rewrite] = {
    Kind.COPIES: rewrites.without_copies_into_inputs,
    Kind.EFFECTS: rewrites.without_side_effects,
    Kind.TRANSPOSES: rewrites.without_transposes,
    Kind.LAYOUTS: rewrites.with_contiguous_transposes,
    Kind.VIEWS: rewrites.without_view_chains,
    Kind.CASTS: rewrites.without_casts,
    Kind.COLLECTIVES: rewrites.without_collectives,
    Kind.CUSTOM: rewrites.without_custom_ops,
}
Compile = Callable[[Variant], Manifest]


def bisect(compiled: Compile, kinds: Sequence[Kind] = tuple(Kind)) -> Bisection:
    """Compile the program once as it is, and once for each kind of op; nothing that was rewritten is run.

    Raises ConfigError where the program compiles to nothing.
    """
    as_it_is = compiled(Variant())
    if not as_it_is.graphs:
        raise ConfigError("the program compiled nothing with Inductor")
    attempts = []
    for kind in kinds:
        is_there = kind is not Kind.SHAPES or has_dynamic_shapes(as_it_is)
        attempts.append(_attempt(compiled, kind) if is_there else Attempt(kind=kind))
    return Bisection(as_it_is=totals(as_it_is), attempts=tuple(attempts))


def _attempt(compiled: Compile, kind: Kind) -> Attempt:
    rewriting = RewritingPass(_REWRITES[kind]) if kind in _REWRITES else None
    try:
        manifest = compiled(Variant(rewriting=rewriting, is_static=kind is Kind.SHAPES))
    except Exception as error:  # Inductor cannot compile every rewritten graph
        return Attempt(kind=kind, failed=_first_line(error))
    if rewriting is None:
        return Attempt(kind=kind, now=totals(manifest))
    found = tuple(map(TakenOut.model_validate, rewriting.found))
    return Attempt(kind=kind, taken_out=found, now=totals(manifest) if found else None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
