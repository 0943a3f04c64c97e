"""All ranks of a job that was not started: each is traced on fake ranks, and compared as in the gate.

plan.py     the command line -> the job: its mesh, and which of its ranks are traced
machine.py  a program for GPUs on a machine without: tensors are on meta, and nothing is lowered
warm.py     what torch imports and builds at a first compile, once for all ranks
trace.py    one rank, in a process of its own -> its record
forks.py    processes of the ranks, forked from one that has imported torch, as many at a time as there are cores
reads.py    where a program reads which rank it is
judge.py    what the ranks left -> one verdict
"""
