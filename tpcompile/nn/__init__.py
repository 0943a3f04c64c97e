"""The tensor-parallel transformer block and its parts; `BlockArgs` says what a block is made of."""

from tpcompile.block_args import BlockArgs

__all__ = ["BlockArgs"]
