"""Proof that torch.compile gave every tensor-parallel rank the same one graph.

tpcompile.recording           CaptureSession: what this process compiled
tpcompile.gate              run: the gate; check_ranks: the same checks for a program of your own
tpcompile.collectives      collectives with a stated gradient, equal in eager and compiled
tpcompile.nn                the tensor-parallel block the gate compiles
tpcompile.testing           check_numerics: a module of your own against itself on one device
tpcompile.evidence          records, digests, comparison, verdict: pure, without torch

Nothing is logged until a program says `loguru.logger.enable("tpcompile")`; the sentinel writes its warnings to stderr.
"""

from loguru import logger

logger.disable("tpcompile")
