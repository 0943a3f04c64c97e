"""Top-level function -> its result on each of N gloo ranks: `tpcompile.testing.ranks`, under the name tests know."""

from tpcompile.testing.ranks import run_on_ranks

__all__ = ["run_on_ranks"]
