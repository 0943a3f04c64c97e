"""`package.module:build` -> Report of the SPMD type check, as `tpcompile typecheck` prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.errors import ConfigError
from tpcompile.ranks.domain import domain_of
from tpcompile.target import Target, build, raised_by
from tpcompile.typecheck.beside_one import Expected
from tpcompile.typecheck.check import Types, check_module, fake_group, on_fake_ranks
from tpcompile.typecheck.decided import decided
from tpcompile.typecheck.numbers import compare_numbers
from tpcompile.typecheck.report import Report


def check_target(
    target: str,
    settings: Sequence[str] = (),
    *,
    nproc: int = 4,
    ranks: Sequence[int] = (0, -1),
    device: str = "cpu",
    input_types: Sequence[str | None] | None = None,
    output_type: Types | None = "I",
    parameter_types: Mapping[str, str] | None = None,
    train: bool = True,
    numbers: bool = True,
) -> Report:
    """Build the target of `tpcompile gate --target` on fake ranks, and follow the types through its program.

    `settings` are `key=value`, as after `--set`; `device` is cpu, or meta for a program too large to be computed. Its
    ranks are those of `nproc` on the target's own axis, and its `step` is not called. With `numbers` the program also
    runs on all ranks and on one device, on CPU in forked processes, and outputs and gradients are compared. All other
    arguments are those of `check_module`. Raises ConfigError for a target that cannot be built or followed.
    """

    shapes = _shapes_on_one_device(target, settings, device)

    def checked(group: dist.ProcessGroup) -> Report:
        built = _built(target, settings, group, device)
        if not isinstance(built.program, nn.Module):
            raise ConfigError(f"{target}: the program is no module; types are those of the parameters of a module")
        in_eager = torch.compiler.set_stance("force_eager") if built.is_compiled else nullcontext()
        with in_eager, raised_by(target):
            inputs = (built.inputs,) if isinstance(built.inputs, Tensor) else built.inputs
            own_mesh = built.mesh
            assert own_mesh is not None, "_built gives it one"
            domain_of(own_mesh, built.axis)  # raises ConfigError for an axis that the mesh does not have
            return check_module(
                built.program,
                inputs,
                group=own_mesh.get_group(built.axis),
                input_types=input_types,
                output_type=output_type,
                parameter_types=parameter_types,
                full_shapes=shapes,
                train=train,
            )

    report = on_fake_ranks(nproc, ranks, checked)
    if device == "meta" or not numbers:
        return report
    found = compare_numbers(
        lambda group: _built(target, settings, group, device),
        size=nproc,
        train=train,
        expected=Expected(output_type, parameter_types or {}),
    )
    return decided(report, found, train=train)


def _built(target: str, settings: Sequence[str], group: dist.ProcessGroup, device: str) -> Target:
    """The target as that rank builds it, with the mesh of all ranks where it has none of its own."""
    mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("tp",))
    built = build(target, settings, rank=group.rank(), device=torch.device(device), mesh=mesh)
    return replace(built, mesh=built.mesh or mesh)


def _shapes_on_one_device(target: str, settings: Sequence[str], device: str) -> dict[str, tuple[int, ...]]:
    """Parameter -> its shape where the target is built for one rank; empty for one that cannot be."""
    try:
        with fake_group(1, 0) as group:
            program = _built(target, settings, group, device).program
            named = program.named_parameters() if isinstance(program, nn.Module) else ()
            return {name: tuple(parameter.shape) for name, parameter in named}
    except Exception:  # the target's: it may be for several ranks only; what is wrong with it, the check itself says
        return {}
