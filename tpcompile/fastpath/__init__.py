"""Fused kernels and what each assumes of a shard: declared, hashed, refused under TP unless they are right there."""

from tpcompile.fastpath.registry import FastPath, TpSupport, fast_path, registered, tp_region
from tpcompile.fastpath.selection import Selection

__all__ = ["FastPath", "Selection", "TpSupport", "fast_path", "registered", "tp_region"]
