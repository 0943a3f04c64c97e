"""Each compiled graph of a call runs beside the graph that it was made from; private names of torch 2.11.0 and 2.13.0.

    name                                        why
    compile_fx.compile_fx(inner_compile=)       graphs behind AOTAutograd, forward and backward, ahead of Inductor
    output_graph.OutputGraph.call_user_compiler graphs of Dynamo, for any backend
    config.get_config_copy, _config             settings that a compile has, to compile a part of its graph alike
    fallback_random, fx_graph_cache,
    enable_autograd_cache                       the same random numbers as eager; nothing but code from a cache
    lowering.lowerings, decomposition.decompositions    functions that are not torch's, and their modules
    debug_utils.cast_dtype_args_to_fp64         a graph in float64
    CompiledFxGraph.source_code                 kernels and the nodes that each was made from

`tests/torch_api/test_comparing.py` fails when one of the names moves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._prims_common import clone_preserve_strides

Settings = dict[str, Any]
Compiled = Callable[..., Sequence[Any]]


class Graph:
    """A graph that was compiled, as it was before."""

    def __init__(self, module: fx.GraphModule, settings: Settings) -> None:
        self.module = fx.GraphModule(module, copy.deepcopy(module.graph))  # passes edit the original
        self.settings = settings
        """Of Inductor, where they are not the default."""
        self.code = ""
        """What Inductor generated."""


OnRun = Callable[[Graph, Sequence[Any], Compiled], Sequence[Any]]
"""(graph, inputs, its compiled code) -> the outputs that the program goes on with."""


@contextmanager
def inductor_graphs(on_run: OnRun) -> Iterator[None]:
    """Call `on_run` for each run of a graph that Inductor compiles inside, forward and backward."""
    from torch._inductor import compile_fx as module

    original = module.compile_fx

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        kept = Graph(graph, _settings())
        compiled = module.compile_fx_inner(graph, inputs, **options)
        kept.code = getattr(compiled, "source_code", "")

        def run(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()
            return list(on_run(kept, given, lambda *copies: compiled(list(copies))))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def patched(*args: Any, **options: Any) -> Any:
        return original(*args, **{"inner_compile": inner, **options})

    with mock.patch.object(module, "compile_fx", patched), searching():
        yield


@contextmanager
def dynamo_graphs(on_run: OnRun) -> Iterator[None]:
    """Call `on_run` for each run of a graph that Dynamo makes inside, whatever backend compiles it."""
    from torch._dynamo.output_graph import OutputGraph

    original = OutputGraph.call_user_compiler

    def call_user_compiler(self: Any, graph: Any, inputs: Any) -> Any:
        kept = Graph(graph, {})
        compiled: Any = original(self, graph, inputs)
        return lambda *args: on_run(kept, args, compiled)

    with mock.patch.object(OutputGraph, "call_user_compiler", call_user_compiler), searching():
        yield


@contextmanager
def searching(*, fallback_random: bool = True) -> Iterator[None]:
    """Random numbers are those of eager, and every graph is compiled anew; its kernels may come from a cache."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with (
        config.patch(fallback_random=fallback_random, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextmanager
def with_settings(settings: Settings) -> Iterator[None]:
    """Inductor's settings inside."""
    from torch._inductor import config

    with searching(), config.patch(settings):
        yield


def _settings() -> Settings:
    from torch._inductor import config

    found = {}
    for name, value in config.get_config_copy().items():
        entry = config._config.get(name)
        is_default = entry is None or repr(entry.default) == repr(value)
        if not is_default and name not in ("fallback_random", "fx_graph_cache"):
            found[name] = value
    return found


def added_modules(backend: Any, settings: Settings) -> list[str]:
    """Names of the modules that are not torch's and made a backend, pass, lowering or decomposition of this process."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    made = [*lowerings.values(), *decompositions.values(), *settings.values()]
    made.append(lookup_backend(backend) if isinstance(backend, str) else backend)
    found = set()
    for one in made:
        is_object = callable(one) and not hasattr(one, "__name__")
        name = getattr(type(one) if is_object else one, "__module__", None)
        if isinstance(name, str) and name.partition(".")[0] not in ("torch", "builtins", "functools", "tpcompile"):
            found.add(name)
    return sorted(found)


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with the dtypes that it names widened."""
    from torch._dynamo.debug_utils import cast_dtype_args_to_fp64

    widened = fx.GraphModule(module, copy.deepcopy(module.graph))
    found: fx.GraphModule = cast_dtype_args_to_fp64(widened)
    return found


def copied_input(value: Any) -> Any:
    """The same tensor with memory of its own; Inductor asserts strides."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return clone_preserve_strides(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value
