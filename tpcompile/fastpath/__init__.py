"""Fused kernels and what each assumes of a shard: declared, hashed, refused under TP unless they are right there."""

from tpcompile.fastpath.registry import FastPath, TpSupport, fast_path, registered, tp_region

__all__ = ["FastPath", "TpSupport", "fast_path", "registered", "tp_region"]
