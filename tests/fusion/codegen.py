"""A program -> its manifest, without a C++ compiler: kernels are generated, and none is compiled or run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.async_compile import AsyncCompile

from tests.fusion.zoo import Program
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.recorder import FusionRecorder


def recorded(program: Program) -> Manifest:
    """Compiled anew."""
    torch.compiler.reset()
    with generating(), FusionRecorder() as recorder:
        program.step()()
    return recorder.manifest()


@contextmanager
def generating() -> Iterator[None]:
    """Kernels do nothing."""
    with mock.patch.object(AsyncCompile, "cpp_pybinding", _compiles_nothing):
        yield


def _compiles_nothing(*_: Any, **__: Any) -> Any:
    return lambda *_: None


@contextmanager
def one_rank() -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
