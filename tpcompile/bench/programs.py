"""A name and what all programs are given -> the program of this rank, ready to be called."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.bench.names import AUTOTUNED, BY_SIZE, GRAPHED, ONE_SHOT, Name
from tpcompile.bench.reference import Given, Renamed, SliceOf
from tpcompile.bench.step import Call, Results, forward_call, training_call
from tpcompile.by_size import sums
from tpcompile.choices import Profile
from tpcompile.config import RunConfig
from tpcompile.profiles import TUNED, Profiled, run
from tpcompile.torch_api import symmetric

_ONE_SHOT = {"_collective.auto_select": True, "_collective.one_shot_all_reduce_threshold_bytes": 1 << 30}
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@dataclass(frozen=True)
class Setup:
    """What every builder of a program is given."""

    name: Name
    settings: RunConfig
    given: Given
    group: dist.ProcessGroup
    device: torch.device

    @property
    def mesh(self) -> DeviceMesh:
        """The group as a mesh of one axis, `tp`."""
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("tp",))

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return getattr(torch, self.settings.block.dtype)


def _as_it_is(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors


def _none(name: str, full: Tensor) -> Tensor | None:
    return None


@dataclass
class Built:
    """This rank's program, before it is compiled. A function of the user's own returns one, made from a `Setup`."""

    module: nn.Module
    inputs: Sequence[Tensor]
    renamed: Renamed = _as_it_is
    slice_of: SliceOf = _none
    """By default no gradient of a parameter is compared."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of Inductor, beside those of the variants."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around every call."""
    check: Callable[[], None] | None = None
    """Raises for a wrong that only the host can see, after the calls."""
    notes: tuple[str, ...] = ()


def build(setup: Setup) -> Built:
    """By the base of the name. Raises ConfigError for a program that cannot run here, and whatever a builder raises."""
    name = setup.name
    if name.is_own:
        module, _, function = name.base.partition(":")
        return getattr(importlib.import_module(module), function)(setup)
    where = {"dtensor": "peers", "dtensor_sp": "peers", "async_tp": "peers", "hooks": "peers", "transformers": "hf"}
    peers = where.get(name.base)
    builders = importlib.import_module(f"scripts.bench_peers.{peers}" if peers else "tpcompile.bench.ours")
    return builders.BUILDERS[name.base](setup)


def compiled_call(setup: Setup, built: Built) -> Call:
    """A call of the program that the name asks for; nothing is compiled yet."""
    name, settings = setup.name, setup.settings
    program: Any = built.module
    if name.base != "eager":
        program = torch.compile(built.module, **_compile_options(setup, built))
    if not settings.train:
        call = forward_call(program, built.inputs)
    else:
        cotangent = setup.given.cotangent
        assert cotangent is not None, "a training run has a cotangent"
        call = training_call(program, built.module, built.inputs, cotangent)

    def within() -> Results:
        with built.around():
            return call()

    return _profiled(setup, within, "max-autotune") if AUTOTUNED in name.variants else within


def captured(setup: Setup, plain: Call) -> Call:
    """The warm program; as one CUDA graph where the name asks for it, captured here."""
    if GRAPHED not in setup.name.variants:
        return plain
    graphed = _profiled(setup, plain, "graphed")
    graphed()
    return graphed


def _profiled(setup: Setup, call: Call, profile: Profile) -> Profiled:
    """Ours and peers alike; the call compiles what it calls, and reads its inputs where they are."""
    return run(
        call,
        profile,
        group=setup.group,
        is_compiled=True,
        timeout_s=setup.settings.gate.store_timeout_s,
        all_reduce="by_size" if BY_SIZE in setup.name.variants else "nccl",
        name=setup.name.text,
    )


def _compile_options(setup: Setup, built: Built) -> dict[str, Any]:
    compile_config = setup.settings.compile
    found: dict[str, Any] = {"backend": compile_config.backend, "dynamic": compile_config.dynamic}
    options = dict(built.options)
    if AUTOTUNED in setup.name.variants:
        options |= TUNED | {"compile_threads": int(os.environ[_THREADS])}
    if ONE_SHOT in setup.name.variants:
        options |= _ONE_SHOT
        symmetric.enable(setup.group)
    by_size = sums("by_size" if BY_SIZE in setup.name.variants else "nccl")
    if by_size is not None:
        options |= by_size.options
        built.notes += (by_size.text(setup.group),)
    if options:
        found["options"] = options
    return found
