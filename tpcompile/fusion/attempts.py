"""`package.module:build` -> the program compiled as it is, and with each kind of op taken out of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpcompile.errors import ConfigError
from tpcompile.fusion import rewrites
from tpcompile.fusion.bisect import Attempt, Bisection, Kind, TakenOut, totals
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.rewrites import LookingPass, Rewrite, RewritingPass
from tpcompile.fusion.targets import Variant

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
    """Compile the program once as it is, and once for each kind of op in it; nothing that was rewritten is run.

    Raises ConfigError where the program compiles to nothing.
    """
    looking = LookingPass(_REWRITES)
    as_it_is = compiled(Variant(graph_pass=looking))
    if not as_it_is.graphs:
        raise ConfigError("the program compiled nothing with Inductor")
    loops = "".join(launch.loops for graph in as_it_is.graphs for launch in graph.launches)
    if any(letter.isalpha() for letter in loops):  # over a size that is a symbol, `s0`
        looking.present.add(Kind.SHAPES)
    attempts = [_attempt(compiled, kind) if kind in looking.present else Attempt(kind=kind) for kind in kinds]
    return Bisection(as_it_is=totals(as_it_is), attempts=tuple(attempts))


def _attempt(compiled: Compile, kind: Kind) -> Attempt:
    rewriting = None if kind is Kind.SHAPES else RewritingPass(_REWRITES[kind])
    try:
        manifest = compiled(Variant(graph_pass=rewriting, is_static=rewriting is None))
    except Exception as error:  # Inductor cannot compile every rewritten graph
        line, _, _ = str(error).strip().partition("\n")
        return Attempt(kind=kind, failed=f"{type(error).__name__}: {line}")
    found = rewriting.found if rewriting else []
    return Attempt(kind=kind, taken_out=tuple(map(TakenOut.model_validate, found)), now=totals(manifest))
