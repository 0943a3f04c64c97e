"""Live detection of rank divergence: a job that diverges ends in seconds, with the cause, and not in a hang.

sentinel.py   the public class
clock.py      guard lookups and compiles of this process -> (region, call, index), the only clock ranks share
compiling.py  the hooks in torch, on the compiling thread; agree.py: a compile ended, do all ranks have the same
channel.py    messages <-> keys of the job's store; messages.py the records
following.py  the thread that blocks on the next event of another rank
rounds.py     the timer: a rank waits, what do the others do; hang.py: their states -> why nothing moves
flight.py     torch's flight recorder and stacks -> collectives in flight; blackbox.py: the stack of an aborted rank
problems.py   what went wrong -> an alarm; ending.py: an alarm -> verdict, report, policy
adapter.py    all private torch API
"""

from tpcompile.sentinel.sentinel import Policy, Sentinel

__all__ = ["Policy", "Sentinel"]
