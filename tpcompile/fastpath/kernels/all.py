"""Imports every module that declares a fast path."""

from tpcompile.fastpath.kernels import all_reduce_norm, qk_exchange, qk_head_norm, qk_norm, qkv_pack, token_norm

__all__ = ["all_reduce_norm", "qk_exchange", "qk_head_norm", "qk_norm", "qkv_pack", "token_norm"]
