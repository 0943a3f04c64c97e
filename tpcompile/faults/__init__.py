"""Planted faults of rank divergence: what the sentinel and the gate must name, each run for real on small ranks.

case.py      what a case is
cases/       all cases, by what differs between the ranks
programs/    the programs, as a user would have written them
context.py   what a program is given; plays one case on one rank
rank.py      `python -m tpcompile.faults.rank CASE --run-dir DIR`, one rank under torchrun
run.py       a case -> torchrun, in a tree of its own (tree.py) -> evidence on disk
judge.py     a case and its evidence -> named, detected, missed, hang, ...
sweep.py     many cases -> results
matrix.py    results -> the detection matrix
columns.py   the same case without the sentinel: what tlparse, DETAIL and spmd_check say

Only context.py and programs/ import torch; its private names that they need are in tpcompile.torch_api.backends.
"""
