"""Whether torch.compile makes a program faster, in which mode, and the one thing to do where it does not.

measure_mode.py  a target and a mode -> what this process measured, as JSON; one process for each mode
mode_records.py  what is measured, and the advice
decide.py        measurements -> advice, and lines of a table
"""
