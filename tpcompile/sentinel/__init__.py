"""Live detection of rank divergence: a job that diverges ends in seconds, with the cause, and not in a hang.

protocol.py   events -> actions: pure, owns the state; events.py defines both; asking.py decides when to ask
progress.py   regions and calls: the only progress that ranks can compare, and the only state updated in steady state
hooks.py      torch's hooks -> events; entries.py which call of compiled code begins
listener.py   the store's log -> events
timer.py      a clock and SIGTERM -> events              raised.py     an exception -> its cause
store_log.py  messages <-> keys of the job's store; messages.py the records
snapshot.py   what this rank does: flight.py from the flight recorder and stacks, blackbox.py after an abort
process.py    a rank's process: whether it is alive
situation.py  the answers of all ranks, now and in the previous round; history.py their collectives in one group
hang.py       a situation -> why the ranks do not progress: the first finding of its rules, which are in
              lost.py  departed.py  parting.py  othergroup.py  onecompiled.py   over waits.py, habit.py, regionlines.py
comparison.py what ran on the ranks -> findings without a stuck rank: split.py, variants.py, counts.py
alarms.py     what is wrong -> an alarm; checks.py the checks
settle.py     an alarm -> verdict, report, policy; shutdown.py how a process ends
sentinel.py   the public class: connects these modules, none of which imports it

Private names of torch are in tpcompile.torch_api.watching.
"""

from tpcompile.sentinel.sentinel import Sentinel
from tpcompile.sentinel.settle import Policy

__all__ = ["Policy", "Sentinel"]
