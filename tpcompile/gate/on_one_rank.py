"""The user's program as `build` makes it for one rank -> a run beside which each line of it has its counterpart.

A reference is written apart: what only the program makes, its packed projections or its partial sums, has no equal
there. The same program on one rank has the same lines, and where it returns what the reference returns, its values are
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.config import TargetConfig
from tpcompile.numerics.optimizer_step import plain_name
from tpcompile.target import Target, TargetContext, find, target_of
from tpcompile.torch_api.alone import world_of_one
from tpcompile.torch_api.dispatch import local_part


@contextmanager
def built_for_one_rank(config: TargetConfig, device: torch.device, reference: nn.Module) -> Iterator[Target | None]:
    """The target of a rank that is alone, whose program is a module with the numbers of the reference; None where that
    cannot be.

    Within it the world has this rank alone, also for meshes of several axes: no other rank is waited for. What `build`
    sets for its whole process, such as a group in a global name, is that of one rank from here on: run the program of
    all ranks before.
    """
    target: Target | None = None
    with ExitStack() as world:
        # An exception is of the user's code, which may be for several ranks only; or of the backend.
        with suppress(Exception, SystemExit):
            world.enter_context(world_of_one())
            target = _built(config, device, reference)
        yield target


def _built(config: TargetConfig, device: torch.device, reference: nn.Module) -> Target | None:
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("tp",))
    context = TargetContext(rank=0, world_size=1, device=device, mesh=mesh, settings=config.settings)
    target = target_of(config, find(config)(context))
    if not isinstance(target.program, nn.Module):
        return None
    _take_numbers(target.program, reference)
    return target


def _take_numbers(program: nn.Module, reference: nn.Module) -> None:
    """Give it the parameters and buffers of the reference, by name, as far as their shapes are equal.

    How many random numbers a build draws ahead of them may depend on the number of ranks.
    """
    known = {plain_name(name): local_part(each) for name, each in _named_tensors(reference)}
    with torch.no_grad():
        for name, each in _named_tensors(program):
            own, wanted = local_part(each), known.get(plain_name(name))
            if wanted is not None and wanted.shape == own.shape:
                own.copy_(wanted)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
