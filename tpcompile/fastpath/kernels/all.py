"""Imports every module that declares a fast path."""

from tpcompile.fastpath.kernels import qk_head_norm, qk_norm, qkv_pack, token_norm

__all__ = ["qk_head_norm", "qk_norm", "qkv_pack", "token_norm"]
