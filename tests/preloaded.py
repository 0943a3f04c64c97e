"""What every forked rank would import and set up again for its first compile; imported by the server of forks."""

# ruff: noqa: E402 - what is said before the imports is about them

from __future__ import annotations

import gc

# Importing torch makes objects that stay: looking for garbage among them would be a sixth of the time.
gc.disable()

import atexit
import os
import weakref
from tempfile import TemporaryDirectory
from unittest import mock

import pytest  # noqa: F401
import sympy.combinatorics
import sympy.tensor.tensor  # noqa: F401
import torch
import torch._functorch.aot_autograd
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch.distributed._functional_collectives
import torch.distributed.device_mesh
import torch.distributed.launcher.api
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel

import tpcompile.faults.generated.forked
import tpcompile.gate.sequence
import tpcompile.preflight
import tpcompile.sentinel
import tpcompile.testing
import tpcompile.torch_api.forked  # noqa: F401

# After each compile Dynamo flushes the CPU's caches, 20 ms, to log how long the guards take.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def _compile_once() -> None:
    """Imports, tables and keys that torch leaves to the first compile."""
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))  # no kernel of Inductor's own: no C++ compiler
    torch._dynamo.reset()


# With a GPU the key of the cache asks for its properties, and CUDA does not survive a fork.
if not torch.cuda.is_available():
    _compile_once()

# A fork that ends need not take apart what it began with: torch's operators are unregistered one by one, for 0.1 s.
for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
    finalizer.atexit = False

# Forks share what is here now: a collection of garbage that walked it would take 0.1 s and copy its pages.
gc.collect()
gc.freeze()
gc.enable()
gc.set_threshold(200_000, 50, 1000)
atexit.register(gc.unfreeze)  # at its end a process drops what it has, and Triton's bindings complain where it is kept
