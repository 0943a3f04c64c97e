"""Proof of a fast path on shards: cases against the plain code on one device, and mutations that they must catch."""

from tpcompile.fastpath.certify.proof import certify
from tpcompile.fastpath.certify.trials import Case, Refusal, trial

__all__ = ["Case", "Refusal", "certify", "trial"]
