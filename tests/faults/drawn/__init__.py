"""Drawn faults of rank divergence: an operator edits the source of a program, a seed draws both.

operators/        edits, each with the causes that a verdict on it must name
programs/         real programs with marked places
template.py       the marks; a program and edits -> the source that is run
programs_list.py  in which ways each program can be run
plan.py           seed -> case
frame.py          what a program is given: groups, device, and what watches its steps
forked.py         ranks forked from a process that has imported torch: a case costs seconds less
judge.py          a case and the result of a route -> named, detected, missed, hang, ...
sweep.py          cases and routes -> rows
table.py, main.py rows -> tables; scripts/generated_faults.py
names.py          names that a rank and the judge share

Nothing here depends on how tpcompile finds a fault: operators come from faults of real jobs, and seeds from 1000 on are
run once.
"""
