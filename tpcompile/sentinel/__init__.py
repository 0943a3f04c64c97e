"""Live detection of rank divergence: a job that diverges ends in seconds, with the cause, and not in a hang.

protocol.py   events -> actions: pure, owns the state; events.py both; asking.py its patience
progress.py   regions and calls: the only clock ranks share, and the only thing steady state touches
hooks.py      torch's hooks -> events                    listener.py   the store's log -> events
timer.py      a clock and SIGTERM -> events              raised.py     an exception -> what is behind it
store_log.py  messages <-> keys of the job's store; messages.py the records
snapshot.py   what this rank does: flight.py from the flight recorder and stacks, blackbox.py after an abort
hang.py       states of all ranks -> why nothing moves; waits.py who waits for whom; parting.py where they parted
settle.py     an alarm -> verdict, report, policy; findings.py the checks; shutdown.py how a process ends
sentinel.py   the public class: wires all this, and no part knows it
adapter.py    all private torch API
"""

from tpcompile.sentinel.sentinel import Sentinel
from tpcompile.sentinel.settle import Policy

__all__ = ["Policy", "Sentinel"]
