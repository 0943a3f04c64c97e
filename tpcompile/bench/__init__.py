"""A preset -> one table of compiled tensor-parallel programs, measured in interleaved rounds beside the floor.

The body of `tpcompile bench`, docs/bench.md. Every program has processes of its own, one per rank, with a process group
of its own; all use the same weights and inputs, and programs take turns in rounds.

__main__        the command line
run.py          presets and programs -> a report: starts the programs, lets them take turns
processes.py    the ranks of a program as processes: asked, answered in time, ended
worker.py       in the process of a rank: the steps of its program
contract.py     what a program is given, and what it returns
names.py        `C+fast:graphed` or FILE:FUNCTION -> base and variants; what cannot run here
programs.py     a name -> the program of a rank, the block that ships or a user's, and its calls: compiled, captured
single_device.py the single-device outputs that every program is compared with
step.py         a call -> its time; events of the profiler -> kernels, launches, exposed communication
power.py        the energy counter -> joules of a step, and whether the power limit holds the clock down
floors.py       rates of this machine, and the least time of a step
reading.py      a kernel that reads memory, for the rate of reading
records.py      the report as records, JSON on disk
ratios.py       rows -> ratios, and what fails the run
baseline.py     a report that was good -> what a later one must not exceed
table.py        the report -> lines
"""
