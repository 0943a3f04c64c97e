"""A preset -> one table of compiled tensor-parallel programs, ours and others', measured in interleaved rounds.

The body of `tpcompile bench`, docs/bench.md. Every program has processes of its own, one per rank, with a process group
of its own; all use the same weights and inputs, and programs take turns in rounds.

__main__        the command line
run.py          presets and programs -> a report: starts the programs, lets them take turns
processes.py    the ranks of a program as processes: asked, answered in time, ended
worker.py       in the process of a rank: builds its program, answers
reference.py    the single-device outputs that every program is compared with; floors are measured beside it
names.py        `C+fast:graphed` -> base and variants; what cannot run here
programs.py     a name -> the program of a rank
ours.py         eager, modes A, B and C, fast paths, compute only
step.py         one call, timed
power.py        the energy counter -> joules of a step, and whether the power limit holds the clock down
profiled.py     events of the profiler -> kernels, launches, exposed communication
floors.py       rates of this machine: matrix products, reads, all-reduces by size and algorithm
reading.py      a kernel that reads memory, for the rate of reading
bound.py        a block's FLOPs and bytes, and rates -> the floor
ratios.py       times of rounds -> medians and ratios
records.py      the report as records, JSON on disk
baseline.py     a report that was good -> what a later one must not exceed
table.py        the report -> lines
"""
