"""Every private or moving name of torch that tpcompile uses, by subject, with the versions it was seen on.

additions.py    passes, backends and tables that a program adds to the compiler
alone.py        a world of one rank within a job of several
autotuning.py   what Inductor times in order to choose between kernels
binaries.py     what Triton compiled of a kernel for a GPU
c10d.py         groups and what precedes their end, and collectives as the eager wrappers issue them
comparing.py    each compiled graph of a call, beside the graph that it was made from
compiler.py     Dynamo, Inductor and the structured trace, as capture reads them
data_parallel.py  FSDP2 and DDP on tensors that hold nothing
dispatch.py     modes that see every op, views and trees of tensors, as the SPMD type check needs them
early_start.py  a captured launch that starts when the kernel before it has started
epilogues.py    a matrix product that ends in an activation
flags.py        settings of torch.backends, as the environment layer compares them
forked.py       what a forked rank sets anew, and the modules that are imported before a fork
generated.py    code that is generated, and the graph that runs instead of it
hooks.py        what Dynamo calls around a compile and after a guard lookup
inlined.py      ops that several kernels compute, and buffers that a limit put into memory
interpreted.py  Triton's interpreter, made to round as GPUs do
kernels.py      a user's Triton kernels and custom ops, as torch keeps them, and launches in eager before they begin
makers.py       functions and classes that others than torch made, in anything that torch calls
no_gpu.py       generated code for a GPU on a machine without one
passes.py       passes over the graphs that Inductor gets
point_to_point.py  sends and receives of any backend, with their stacks
profiler.py     what the profiler saw on the GPU, without what is only drawn there
registrations.py  the files that registered an op and its kernels
resources.py    registers and shared memory of compiled Triton kernels
scheduled.py    nodes of Inductor's scheduler: what each reads, writes and computes
scheduling.py   what Inductor's scheduler decides, as it decides it
simulated.py    all ranks in one process
symmetric.py    memory of a GPU that the other ranks of a group can write
tested_versions.py  the versions that all this was tested with
watching.py     calls of compiled code and the flight recorder, as the sentinel sees them

Each has a test in tests/torch_api that fails when torch moves one of its names.
"""

from torch import __version__

from tpcompile.torch_api.tested_versions import warn_if_untested

warn_if_untested(__version__)
