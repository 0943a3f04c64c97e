"""What the tests' forked processes use beside what the pytest plugin imports for every rank; imported by its server."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import weakref
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import loguru._better_exceptions
import pytest  # noqa: F401
import sympy.combinatorics
import sympy.tensor.tensor  # noqa: F401
import torch
import torch._functorch.aot_autograd
import torch._inductor.codegen.cpp
import torch._inductor.config
import torch.distributed.device_mesh
import torch.distributed.launcher.api
import torch.distributed.tensor.parallel
import torch.utils._config_module
import triton.experimental.gluon  # noqa: F401

import tests.faults.run
import tests.forked  # noqa: F401
import tpcompile.cli
import tpcompile.gate.in_rank
import tpcompile.launch
import tpcompile.preflight
import tpcompile.sentinel
import tpcompile.testing  # noqa: F401
from tpcompile import config
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.block import TransformerStack
from tpcompile.numerics.draw import draw_inputs
from tpcompile.torch_api.generated import uncompiled_kernels

MADV_COLLAPSE = 25
HUGE_PAGE = 1 << 21

# After each compile Dynamo flushes the CPU's caches, 20 ms, to log how long the guards take.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# For a line of a log that is not on, Dynamo tokenizes every file that it traces, once in each process.
torch._dynamo.funcname_cache._add_file = lambda filename: torch._dynamo.funcname_cache.cache.update({filename: {}})

# For every file of a log loguru asks for the folders of Python's libraries again, 3 ms.
_folders = loguru._better_exceptions.ExceptionFormatter._get_lib_dirs()
loguru._better_exceptions.ExceptionFormatter._get_lib_dirs = staticmethod(lambda: _folders)

# Kernels without vector instructions take half the time in the C++ compiler.
torch._inductor.config.cpp.simdlen = 1

# A fork that ends need not take apart what it began with: torch's operators are unregistered one by one, for 0.1 s.
for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
    finalizer.atexit = False


def compile_kernels() -> None:
    """What Inductor does once in each process before its first C++ kernel, 0.3 s of CPU time and 0.9 s of waiting:
    it reads the compiler's version, and preprocesses all headers to see whether they have changed."""
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        weight = torch.ones(16, 16, requires_grad=True)
        compiled = torch.compile(lambda x: torch.nn.functional.rms_norm(x @ weight, (16,)).sin())
        with uncompiled_kernels():
            compiled(torch.ones(8, 16)).sum().backward()
        with torch.no_grad():
            compiled(torch.ones(8, 16))
    torch.compiler.reset()


def compile_blocks() -> None:
    """What torch keeps of a first compile, 0.2 to 0.5 s of CPU time in every rank that compiles our blocks: results of
    operators on fake tensors, tables of decompositions, sources that were read."""
    for preset in ("cpu_smoke", "llama_smoke"):
        args = config.load(preset, device="cpu").block
        stack = TransformerStack(args, Collectives(None), num_layers=1)
        x_BSD, *rest = draw_inputs(args, seed=1, device="cpu", dtype=torch.float32, seq_len=args.seq_len)
        torch.compile(stack, backend="aot_eager")(x_BSD.requires_grad_(), *rest).sum().backward()
        torch.compiler.reset()


def keep_tables() -> None:
    """A rank that joins its group drops Dynamo's rules for the objects of torch, and makes them anew: 20 ms."""
    rules = torch._dynamo.trace_rules
    anew = rules.get_torch_obj_rule_map.__wrapped__()  # those of polyfills are not in it
    rules.clear_lru_cache = lambda: setattr(rules, "get_torch_obj_rule_map", lambda: anew)


def read_settings_at_once() -> None:
    """Dynamo reads settings at each instruction, 3 % of a compile, most of it for what few settings have: an alias,
    a variable of the environment, a warning. torch 2.11 reads them with less."""
    module = torch.utils._config_module
    read, unset = module.ConfigModule.__getattr__, module._UNSET_SENTINEL
    plain = {
        id(entry)
        for settings in list(sys.modules.values())
        if isinstance(settings, module.ConfigModule)
        for entry in settings._config.values()
        if isinstance(entry.user_override, ContextVar)
        and not (entry.alias or entry.justknob or entry.deprecated)
        and entry.env_value_force is entry.env_value_default is unset
        and isinstance(entry.default, bool | int | str | None)  # others are copied
    }

    def read_plain(settings: Any, name: str) -> Any:
        entry = settings._config.get(name)
        if id(entry) not in plain or entry.hide:
            return read(settings, name)
        value = entry.user_override.get()
        return entry.default if value is unset else value

    module.ConfigModule.__getattr__ = read_plain


def use_huge_pages() -> None:
    """A fork copies the table of all pages: 25 ms of CPU time, and 7 where the kernel can make huge ones of them."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split()
        if access != "rw-p" or inode != "0" or name == ["[stack]"]:
            continue
        begin, end = (int(address, 16) for address in place.split("-"))
        begin = -(-begin // HUGE_PAGE) * HUGE_PAGE
        if end - begin >= HUGE_PAGE:
            madvise(begin, (end - begin) // HUGE_PAGE * HUGE_PAGE, MADV_COLLAPSE)  # an older kernel refuses


compile_kernels()
compile_blocks()
keep_tables()
read_settings_at_once()
use_huge_pages()
gc.set_threshold(200_000, 50, 1000)
