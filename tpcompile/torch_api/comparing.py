"""Each compiled graph of a call runs beside the graph that it was made from; private names of torch 2.11.0 and 2.13.0.

    name                                        why
    compile_fx.compile_fx(inner_compile=)       graphs behind AOTAutograd, forward and backward, ahead of Inductor
    output_graph.OutputGraph.call_user_compiler graphs of Dynamo, for any backend
    _TorchCompileWrapper, registry._COMPILER_FNS    the backend that a program was compiled with
    config.get_config_copy, _config             settings that a compile has, to compile a part of its graph alike
    fallback_random, fx_graph_cache,
    enable_autograd_cache                       the same random numbers as eager; nothing but code from a cache
    lowering.lowerings, decomposition.decompositions    functions that are not torch's, and their modules

`tests/torch_api/test_comparing.py` fails when one of the names moves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._prims_common import clone_preserve_strides

_NOT_ADDED = ("torch", "builtins", "functools", "tpcompile")
Settings = dict[str, Any]
Compiled = Callable[..., Sequence[Any]]
PutBack = Callable[[], None]


class Graph:
    """A graph that was compiled, as it was before."""

    def __init__(
        self, module: fx.GraphModule, settings: Settings, *, backend: Any = "inductor", is_backward: bool = False
    ) -> None:
        self.module = fx.GraphModule(module, copy.deepcopy(module.graph))  # passes edit the original
        self.settings = settings
        """Settings of Inductor that are not the default."""
        self.backend = backend
        """Its name, or the function where it has none."""
        self.is_backward = is_backward


OnRun = Callable[[Graph, Sequence[Any], Compiled], Sequence[Any]]
"""(graph, inputs, its compiled code) -> the outputs that the program goes on with."""


@contextmanager
def inductor_graphs(on_run: OnRun) -> Iterator[None]:
    """Call `on_run` for each run of a graph that Inductor compiles inside, forward and backward."""
    from torch._inductor import compile_fx as module

    original = module.compile_fx

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        kept = Graph(graph, _settings(), is_backward=bool(options.get("is_backward")))
        compiled = module.compile_fx_inner(graph, inputs, **options)

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
        kept = Graph(graph, _settings(), backend=_backend(self.compiler_fn))
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


class Added(NamedTuple):
    """Something that is not torch's and that torch.compile calls: a backend, a pass, a lowering, a decomposition."""

    module: str
    line: str
    """Python that puts it in again; empty where importing its module does."""


def _backend(compiler: Any) -> Any:
    """The name under which a backend is registered, else the backend."""
    from torch._dynamo.backends import registry

    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    if isinstance(compiler, torch._TorchCompileInductorWrapper):
        return "inductor"
    if isinstance(compiler, torch._TorchCompileWrapper):
        compiler = compiler.compiler_fn
    known = (name for name, function in registry._COMPILER_FNS.items() if function is compiler)
    return next(known, compiler)


def added(backend: Any, settings: Settings) -> list[Added]:
    """What this process added to the compiler, of modules that can be imported again."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._inductor import decomposition, lowering
    from torch._ops import OpOverload, OpOverloadPacket

    made = [(f"torch._inductor.config.{name} = {{}}", value) for name, value in sorted(settings.items())]
    for table in (lowering.lowerings, decomposition.decompositions):
        where = "lowering.lowerings" if table is lowering.lowerings else "decomposition.decompositions"
        ops = {op: function for op, function in table.items() if isinstance(op, (OpOverload, OpOverloadPacket))}
        made += [(f"torch._inductor.{where}[torch.ops.{op}] = {{}}", function) for op, function in ops.items()]
    made.append(("", lookup_backend(backend) if isinstance(backend, str) else backend))
    found = []
    for line, one in made:
        module = getattr(one, "__module__", None)
        if not callable(one) or not isinstance(module, str):
            continue
        if module.partition(".")[0] not in _NOT_ADDED:
            what = expression(one)
            found.append(Added(module, "" if "<" in what else line.format(what)))
    return found


def expression(one: Any) -> str:
    """Python for a function, or for an object of a class without arguments, of a module that is imported."""
    is_object = not hasattr(one, "__qualname__")
    maker = type(one) if is_object else one
    return f"sys.modules[{maker.__module__!r}].{maker.__qualname__}" + ("()" if is_object else "")


def put_back_random() -> PutBack:
    """A function that sets torch's random numbers back to where they are now, on the CPU and on the current GPU."""
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)

    return put_back


def copied_input(value: Any) -> Any:
    """The same tensor with memory of its own; Inductor asserts strides."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return clone_preserve_strides(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value
