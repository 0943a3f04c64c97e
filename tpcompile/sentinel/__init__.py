"""Live detection of rank divergence: a job that diverges ends in seconds, with the cause, and not in a hang.

protocol.py   events -> actions: pure, owns the state; events.py both; asking.py its patience
progress.py   regions and calls: the only clock ranks share, and the only thing steady state touches
hooks.py      torch's hooks -> events; entries.py which call of compiled code begins
listener.py   the store's log -> events
timer.py      a clock and SIGTERM -> events              raised.py     an exception -> what is behind it
store_log.py  messages <-> keys of the job's store; messages.py the records
snapshot.py   what this rank does: flight.py from the flight recorder and stacks, blackbox.py after an abort
process.py    what a rank says of its process: whether it lives
situation.py  what all ranks say, now and in the round before; history.py what they issued in one group, by number
hang.py       a situation -> why nothing moves: the first finding of its rules, which are in
              lost.py  departed.py  parting.py  othergroup.py  onecompiled.py   over waits.py, habit.py, regionlines.py
comparison.py what ran on the ranks -> split.py, variants.py, counts.py: the same without a rank that is stuck
alarms.py     what is wrong -> an alarm; checks.py the checks
settle.py     an alarm -> verdict, report, policy; shutdown.py how a process ends
sentinel.py   the public class: wires all this, and no part knows it

Private names of torch are in tpcompile.torch_api.watching.
"""

from tpcompile.sentinel.sentinel import Sentinel
from tpcompile.sentinel.settle import Policy

__all__ = ["Policy", "Sentinel"]
