"""Programs whose fused kernels stand in no graph under a name of their own, and healthy ones that look alike.

Each is a context manager, since what it registers acts on the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from tpcompile.evidence.records import RankRecord
from tpcompile.recording import CaptureSession
from tpcompile.target import Target, TargetContext


class Evading(NamedTuple):
    """A function to compile and the backend to compile it with."""

    program: Callable[[Tensor], Tensor]
    backend: Any = "eager"


@contextmanager
def closing(library: torch.library.Library) -> Iterator[torch.library.Library]:
    """What the library registers ends with the block."""
    try:
        yield library
    finally:
        library._destroy()


def local_norm(x: Tensor) -> Tensor:
    """A norm over what it is given: over the shard."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def takes_fragment(namespace: str) -> Callable[[], AbstractContextManager[Evading]]:
    """An op that is registered in a namespace of torch, as `torch.library.Library` allows."""

    @contextmanager
    def program() -> Iterator[Evading]:
        with closing(torch.library.Library(namespace, "FRAGMENT")) as library:
            library.define("local_norm(Tensor x) -> Tensor")
            library.impl("local_norm", local_norm, "CompositeExplicitAutograd")
            library.impl("local_norm", torch.empty_like, "Meta")
            yield Evading(lambda x: getattr(torch.ops, namespace).local_norm(x))  # the user's line

    return program


@contextmanager
def overload() -> Iterator[Evading]:
    """A new overload of an op of torch."""
    with closing(torch.library.Library("aten", "FRAGMENT")) as library:
        library.define("rsqrt.mine(Tensor x, bool local) -> Tensor")
        library.impl("rsqrt.mine", lambda x, local: local_norm(x), "CompositeExplicitAutograd")
        library.impl("rsqrt.mine", lambda x, local: torch.empty_like(x), "Meta")
        yield Evading(lambda x: torch.ops.aten.rsqrt.mine(x, True))  # the user's line


@torch.library.custom_op("quantized::fused_norm", mutates_args=())
def fused_norm(x: Tensor) -> Tensor:
    return local_norm(x)


fused_norm.register_fake(torch.empty_like)


@contextmanager
def custom_op() -> Iterator[Evading]:
    yield Evading(lambda x: fused_norm(x))  # the user's line


@contextmanager
def overridden() -> Iterator[Evading]:
    """Another kernel under the name of torch's op."""
    with closing(torch.library.Library("aten", "IMPL")) as library:
        library.impl("silu", local_norm, "CPU")
        yield Evading(F.silu)


def fuses_norms(graph: torch.fx.Graph) -> None:
    """A pass, as fusions are usually added."""


class FusesNorms:
    """A pass that is an object."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Edit the graph in place."""


MAY_CALL_INDUCTOR = aot_autograd(fw_compiler=boxed_nop)
"""torch's wrapper of any compiler; this one takes no time."""


def with_setting(
    name: str, value: Any, backend: Any = MAY_CALL_INDUCTOR
) -> Callable[[], AbstractContextManager[Evading]]:
    """A pass in a setting of Inductor."""

    @contextmanager
    def program() -> Iterator[Evading]:
        with inductor_config.patch({name: value}):
            yield Evading(torch.sin, backend)

    return program


def swaps_nodes(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend that puts a kernel of its own in place of torch's ops, and leaves the rest to torch."""
    for node in graph.graph.nodes:
        if node.target is F.silu:
            node.target = local_norm
            node.kwargs = {}
    graph.recompile()
    return aot_eager(graph, inputs)


def compiles_forward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    return make_boxed_func(graph.forward)


@contextmanager
def own_backend() -> Iterator[Evading]:
    yield Evading(F.silu, swaps_nodes)


@contextmanager
def own_compiler() -> Iterator[Evading]:
    """torch's wrapper around a compiler of one's own."""
    yield Evading(F.silu, aot_autograd(fw_compiler=compiles_forward))


@torch.compiler.allow_in_graph
def untraced(x: Tensor) -> Tensor:
    return local_norm(x)


@torch._dynamo.nonstrict_trace
def traced_leniently(x: Tensor) -> Tensor:
    return local_norm(x)


def in_graph(function: Callable[[Tensor], Tensor], backend: str) -> Callable[[], AbstractContextManager[Evading]]:
    """A function that Dynamo leaves in the graph as one call."""

    @contextmanager
    def program() -> Iterator[Evading]:
        yield Evading(lambda x: function(x.sin()), backend)  # the user's line

    return program


@contextmanager
def torchs_own() -> Iterator[Evading]:
    """Ops that torch registers from Python, in several namespaces."""
    import torch.ao.quantization.fx._decomposed

    def program(x: Tensor) -> Tensor:
        quantized = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8)
        return torch.ops.prims.sin(quantized.float()) + torch.ops.aten.rsqrt(x)

    yield Evading(program)


EVADING: dict[str, Callable[[], AbstractContextManager[Evading]]] = {
    "aten fragment": takes_fragment("aten"),
    "inductor fragment": takes_fragment("inductor"),
    "overload": overload,
    "custom op": custom_op,
    "overridden": overridden,
    "post-grad pass": with_setting("post_grad_custom_post_pass", fuses_norms),
    "joint pass": with_setting("joint_custom_pre_pass", FusesNorms()),
    "fusion pass": with_setting("_post_fusion_custom_pass", fuses_norms),
    "passes in a list": with_setting("reorder_for_compute_comm_overlap_passes", [fuses_norms]),
    "own backend": own_backend,
    "own compiler": own_compiler,
    "allow_in_graph": in_graph(untraced, "eager"),
    "nonstrict_trace": in_graph(traced_leniently, "eager"),
}
HEALTHY: dict[str, Callable[[], AbstractContextManager[Evading]]] = {
    "of torch": torchs_own,
    "allow_in_graph, traced": in_graph(untraced, "aot_eager"),
    "pass of Inductor, not compiled with it": with_setting("post_grad_custom_post_pass", fuses_norms, "aot_eager"),
    "passes in a list, in eager": with_setting("reorder_for_compute_comm_overlap_passes", [fuses_norms], "eager"),
    "torch's pass": with_setting("reorder_for_compute_comm_overlap_passes", ["reorder_compute_for_overlap"]),
}
ON_RANKS = ("aten fragment", "custom op", "overridden", "post-grad pass", "own backend", "allow_in_graph")
DECLARED = {
    "post-grad pass": "fuses_norms",
    "own backend": "swaps_nodes",
    "overridden": "aten::silu",
    "allow_in_graph": "untraced",
}


def verdicts() -> dict[str, str]:
    """Name of each program -> this rank's verdict on it; of a declared one with ` declared` behind it."""
    torch._dynamo.config.cache_size_limit = 64
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {}
    for name in (*ON_RANKS, *HEALTHY):
        found[name] = verdict({**EVADING, **HEALTHY}[name], mesh, ())
    for name, declaration in DECLARED.items():
        found[f"{name} declared"] = verdict(EVADING[name], mesh, (declaration,))
    return found


def captured(name: str) -> RankRecord:
    """What one rank of two captures of a program."""
    torch.compiler.reset()
    with EVADING[name]() as made, CaptureSession() as session:
        torch.compile(made.program, backend=made.backend)(torch.ones(4))
        return session.record(rank=0, world_size=2)


def records() -> dict[str, str]:
    """Name of each evading program -> this rank's record of it."""
    return {name: captured(name).model_dump_json() for name in EVADING}


def verdict(program: Callable[[], AbstractContextManager[Evading]], mesh: Any, tp_aware: tuple[str, ...]) -> str:
    """Compile and call it once."""
    torch.compiler.reset()
    with program() as made, tpcompile.capture(mesh, watch=False, tp_aware=tp_aware) as run:
        torch.compile(made.program, backend=made.backend)(torch.ones(4))
        return tpcompile.check(run, timeout_s=30).to_json()


def build(context: TargetContext) -> Target:
    """A target of the gate that evades in the way that `--set target.how=...` names."""
    entered = EVADING[context.settings["how"]]()
    made = entered.__enter__()
    _KEPT.append(entered)
    return Target(program=torch.compile(made.program, backend=made.backend), inputs=torch.ones(4), is_compiled=True)


_KEPT: list[Any] = []
"""What is registered stays for as long as the program runs."""
