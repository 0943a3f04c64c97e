"""Known faults, which the gate, the sentinel and diagnose must name, and healthy programs, which must stay green.

registry.py    name -> declaration; two of one name are refused
injected/      faults that `tpcompile gate --fault NAME` injects; below the gate, without what follows here
case.py        a case: what is planted and what must be reported; declared on its program by @fault or @healthy
programs/      planted faults, and healthy programs that look like one, small and as a user would have written them
healthy/       healthy programs with parameters to draw; drawn.py is what they are given
context.py     what a program of programs/ is given; plays one case on one rank
rank.py        one rank of one case, under torchrun
run.py         a case -> torchrun, in a process tree of its own (tree.py) -> evidence on disk -> result
judge.py       a case and its evidence -> named, detected, missed, hang, ...
alarms.py      what a run of a healthy program left -> its alarms
sweep.py       many cases -> results
matrix.py      results -> the detection matrix
columns.py     the same case without the sentinel: what tlparse, DETAIL and spmd_check report
__main__.py    the body of `tpcompile faults`
clean_runs.py  many runs of healthy programs, drawn; scripts/clean_runs.py
generated/     faults that are generated from seeds; scripts/generated_faults.py
"""
