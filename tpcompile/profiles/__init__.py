"""How a compiled callable is run, by name: `tpcompile.run(program, profile=...)`, the same on all ranks.

    default   torch.compile, one graph
    graphed   the same, and all that a call launches, its collectives too, is one CUDA graph
    max-autotune  kernels are chosen by their times on the first rank, and are the same on all ranks
    measured  whichever of them is faster, by the times of the first call on all ranks

callables.py    program, profile -> the callable that `run` returns
graphed.py      calls -> replays of the CUDA graph of their signature
signature.py    arguments -> what a CUDA graph is made for, and the buffers that it reads
gradients.py    a program -> the parameters whose gradients it may compute, and where those are
cuda_graphs.py  a function -> its CUDA graph; the only module that needs CUDA
agreement.py    what each rank is about to run -> the same on all of them, or the ranks that differ
call_times.py   times of the candidates on every rank -> the one that all ranks run
steps.py        what the ranks compare of one callable, and when
chosen.py       the profiles of this process -> entries of its environment, which ranks compare
"""

from tpcompile.profiles.callables import Profiled, run
from tpcompile.torch_api.autotuning import OPTIONS as TUNED

__all__ = ["TUNED", "Profiled", "run"]
