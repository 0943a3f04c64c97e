"""The live session: what torch compiled in this process -> `RankRecord`.

session.py         all compiles of a session
regions.py         how many compiled regions each call of a compiled callable entered
rank_reads.py      reads of the rank in traced code
foreign.py         custom ops and Triton kernels in compiled graphs
additions.py       passes, backends and replaced kernels, which no graph names
flow.py            the lines of user code that this process executes, and the values they set, into a ring
flow_callbacks.py  the callbacks for it: flow.c, or Python without a compiler
early.py           the same from the import of the sentinel on, before a rank is watched
assigned.py        code -> the names that each of its lines gives a value
before.py          what the program had set when the recording began
own_numbers.py     the numbers that tell its rank from others, which texts may have
variables.py       the variables of a frame, without keeping what they hold alive
ring.py            a mapped file that outlives the process
"""

from tpcompile.recording.session import CaptureSession

__all__ = ["CaptureSession"]
