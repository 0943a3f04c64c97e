"""Fused kernels and what each assumes about its tensors: declared, hashed, refused under TP unless proved on shards.

declare.py      `@fast_path`: what a launcher assumes of its arguments, checked at each eager call
registry.py     all fast paths by name; `tp_region`
source.py       a launcher -> the hash of its source
hashing/        all that a launcher runs or reads -> texts to hash
certificate.py  a fast path -> whether it was proved on shards
certify/        `tpcompile certify`: makes certificates
ban.py          custom ops, kernels, passes and backends of a program -> which are refused, and why
use.py          a custom op or kernel in a graph -> its fast path, and the lines to name
eager.py        the same refusals for custom ops that are called in eager
in_turn.py      calls of one exchange -> one after the other on the device, and numbered
peers.py        an error on one rank -> the same error on ranks whose kernels wait for it
measured.py     the table of measurements -> what one rank chooses
selection.py    what each rank chose -> one decision on all ranks
tiles.py        which products of few rows a kernel takes
plain.py        the plain code that fast paths replace
kernels/        the fast paths that ship
"""

from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.eager import ban_in_eager
from tpcompile.fastpath.registry import FastPath, TpSupport, registered, tp_region
from tpcompile.fastpath.selection import Selection

__all__ = ["FastPath", "Selection", "TpSupport", "ban_in_eager", "fast_path", "registered", "tp_region"]
