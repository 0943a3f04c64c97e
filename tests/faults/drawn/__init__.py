"""Drawn faults of rank divergence: an operator edits the source of a program, a seed draws both.

operators/        edits, each with the causes that a verdict on it must name
programs/         real programs with marked places
template.py       the marks; a program and edits -> the source that is run
programs_list.py  in which ways each program can be run
plan.py           seed -> case
frame.py          what a program is given: groups, device, and what watches its steps
models.py         models of several programs, whose making no operator edits
sweep.py          cases and routes -> rows
table.py          rows -> tables, for scripts/generated_faults.py

Nothing here depends on how tpcompile finds a fault: operators come from faults of real jobs, and seeds from 1000 on are
run once.
"""
