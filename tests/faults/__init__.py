"""Planted faults, which the gate, the sentinel and diagnose must name, and healthy programs, which must stay green.

case.py        a case: what is planted and what must be reported; declared on its program by @fault or @healthy
planted/       planted faults, and healthy programs that look like one, small and as a user would have written them
healthy/       healthy programs with parameters to draw; program.py is what they are given
context.py     what a program of planted/ is given; plays one case on one rank
rank.py        one rank of one case, under torchrun
run.py         a case -> torchrun, in a process tree of its own (tree.py) -> evidence on disk -> result
judge.py       a case and its evidence -> named, detected, missed, hang, ...
alarms.py      what a run of a healthy program left -> its alarms
sweep.py       many cases -> results
matrix.py      results -> the detection matrix
columns.py     the same case without the sentinel: what tlparse, DETAIL and spmd_check report
clean_runs.py  many runs of healthy programs, drawn; scripts/clean_runs.py
drawn/         faults that are drawn from seeds; scripts/generated_faults.py

scripts/faults.py lists and runs the planted ones. tpcompile/gate/faults/ is what `tpcompile gate --fault NAME` injects.
"""
