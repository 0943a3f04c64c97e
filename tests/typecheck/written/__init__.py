"""Modules written by hand in the styles of the field, each with faults that can be switched on by `--set fault=NAME`.

A line that a fault may be reported at has the fault's name in a comment: `# <- NAME`.
"""
