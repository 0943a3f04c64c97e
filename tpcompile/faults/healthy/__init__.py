"""Clean programs by name: correct tensor-parallel programs that the sentinel must let run, and one that it must not.

frame.py           Draw (what varies), Run (what a program gets), the registry
blocks.py          our transformer blocks
compiled.py        ways to use torch.compile
life.py            what else happens in a job: slow ranks, evaluation, checkpoints, data loaders, reset
uneven.py          what may differ between ranks
dtensors.py        DTensor plans, FSDP2
hugging_face.py    transformers under its own tensor-parallel plan
broken.py          the negative control
"""

from __future__ import annotations

from tpcompile.faults.healthy import blocks, broken, compiled, dtensors, hugging_face, life, uneven
from tpcompile.faults.healthy.frame import Program

MODULES = (blocks, compiled, life, uneven, dtensors, hugging_face, broken)
EVERY: dict[str, Program] = {program.name: program for module in MODULES for program in module.PROGRAMS.programs}
PROGRAMS: dict[str, Program] = {name: program for name, program in EVERY.items() if program.is_clean}
"""The clean ones, in order."""
