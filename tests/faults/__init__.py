"""Planted faults, which the gate, the sentinel and diagnose must name, and healthy programs, which must stay green.

case.py        a case and what is right for it; a planted one is declared on its program by @fault or @healthy
planted/       planted faults, and healthy programs that look like one, small and as a user would have written them
healthy/       healthy programs with parameters to draw, for scripts/clean_runs.py; program.py is what they are given
backends.py    backends, passes and autotuning that a planted fault needs; private names of torch
context.py     what a program of planted/ is given; plays one case on one rank
rank.py        one rank of one case, under torchrun
run.py         launches -> how their ranks ended, under torchrun or forked; all that starts a process
names.py       routes, and names of files, that a rank and the judge share
judge.py       what is right for a case, and what its run left -> named, detected, missed, hang, ...
alarms.py      what a run of a healthy program left -> its alarms
sweep.py       many planted cases -> results
matrix.py      results -> the detection matrix
columns.py     the same case without the sentinel: what tlparse, DETAIL and spmd_check report
registry.py    name -> declaration; two of one name are refused
drawn/         faults that are drawn from seeds; scripts/generated_faults.py

scripts/faults.py lists and runs the planted ones. tpcompile/gate/faults/ is what `tpcompile gate --fault NAME` injects.
"""
