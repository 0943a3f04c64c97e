"""Fused kernels and what each assumes about its tensors: declared, hashed, refused under TP unless proved on shards."""

from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.eager import ban_in_eager
from tpcompile.fastpath.registry import FastPath, TpSupport, registered, tp_region
from tpcompile.fastpath.selection import Selection

__all__ = ["FastPath", "Selection", "TpSupport", "ban_in_eager", "fast_path", "registered", "tp_region"]
