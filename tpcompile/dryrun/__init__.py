"""All ranks of a job that was not started: each is traced on fake ranks, and compared as in the gate.

plan.py         the command line -> the job: its mesh, and which of its ranks are traced
machine.py      a program for GPUs on a machine without: tensors are on meta, and nothing is lowered
arch.py         a GPU that is not there, for which Inductor generates code
warm.py         what torch imports and builds at a first compile, once for all ranks
alike.py        which ranks are traced, and which start from what a rank that was traced started from
forks.py        processes of the ranks, forked from one that has imported torch, as many at a time as there are cores
rank.py         one rank, in a process of its own -> what it leaves
trace.py        the phases of one rank -> its record
reach.py        what the calls of a rank can reach -> one hash
reads.py        where a program learns which rank it is
tripwires.py    what a program may learn it from, in Python and in C
group_order.py  process groups of all ranks -> a check that they were made in one order
branch.py       a difference between ranks -> the line at which they parted, from a second trace of some of them
judge.py        what the ranks left -> one verdict
"""
