"""What the tests' forked processes use beside what the pytest plugin imports for every rank; imported by its server."""

from __future__ import annotations

import gc
import weakref

import torch._inductor.codegen.cpp
import torch.distributed.device_mesh
import torch.distributed.launcher.api
import torch.distributed.tensor.parallel  # noqa: F401

import tpcompile.faults.generated.forked
import tpcompile.gate.sequence
import tpcompile.preflight
import tpcompile.sentinel
import tpcompile.testing  # noqa: F401

# A fork that ends need not take apart what it began with: torch's operators are unregistered one by one, for 0.1 s.
for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
    finalizer.atexit = False

gc.set_threshold(200_000, 50, 1000)
