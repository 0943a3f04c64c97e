"""Before the first compile, check that the ranks are set up alike, and name what differs; no collective, no hang.

handshake.py      `check_setup`, `Handshake`: facts of all ranks -> one verdict on every rank
inputs.py         `InputCheck`: the inputs of a call as named leaves, bit for bit, on demand
facts.py          the facts of one rank, by group
backends.py       the backend that `auto` resolves to
weights.py        which parameters are replicated, which sharded, their fingerprints; do the shards fit
fingerprint.py    tensor -> text equal exactly when the bits are
fact_judge.py     facts of all ranks -> checks and divergences
conclusion.py     values of one key by rank -> a named difference; differences -> checks -> verdict
locate.py         first element in which two ranks' tensors differ
machine.py        what torch knows of this machine, as JSON, for `tpcompile doctor`
fact_exchange.py  digests through the store, details on difference, one judge
"""

from tpcompile.preflight.backends import sdpa_backend
from tpcompile.preflight.handshake import Handshake, check_setup
from tpcompile.preflight.inputs import InputCheck

__all__ = ["Handshake", "InputCheck", "check_setup", "sdpa_backend"]
