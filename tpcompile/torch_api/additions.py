"""What a program adds to the compiler, as torch keeps it; private names, seen on torch 2.11.0 and 2.13.0.

    name                                        why
    symbolic_convert.InstructionTranslator      `current_tx()`: the backend, and the graph that Dynamo has just made
    _dynamo.backends.registry.lookup_backend    torch's own backends by name
    _torchdynamo_orig_backend, compiler_fn      what Dynamo's and torch.compile's wrappers of a backend hold
    _inductor.config, _functorch.config         passes, partitioners and choices that a setting holds
    _inductor.lowering.lowerings                what Inductor makes of an op
    _inductor.decomposition, _decomp            what an op is replaced by before
    _inductor.fx_passes.*                       `PatternMatcherPass`: replacements that are found in any graph
    _inductor.codegen.common.device_codegens    who generates code for a device
    _inductor.select_algorithm.extern_kernels   the libraries' kernels, as generated code calls them

`tests/torch_api/test_additions.py` fails when one of them moves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch._functorch.config as _functorch_config
import torch._inductor.config as _inductor_config
from torch._dynamo.backends.registry import lookup_backend as _lookup_backend
from torch._dynamo.symbolic_convert import InstructionTranslator as _InstructionTranslator

from tpcompile.torch_api import makers

_CHANGES_NO_CODE = ("trace.",)
"""Settings of Inductor whose functions get what was compiled, and change nothing."""
_OP_TABLES = (
    ("torch._inductor.lowering", "lowerings"),
    ("torch._inductor.lowering", "user_lowerings"),
    ("torch._inductor.decomposition", "decompositions"),
    ("torch._inductor.codegen.common", "device_codegens"),
    ("torch._inductor.select_algorithm", "extern_kernels"),
    ("torch._decomp", "decomposition_table"),
)
"""(module, name) of each table in which torch looks up what an op becomes."""
_PASSES = "torch._inductor.fx_passes."
_AOT = ("torch._functorch.",)
_DECOMPOSITIONS = ("torch._inductor.decomposition", "torch._decomp")
_RUN_BY: dict[str, tuple[str, ...]] = {
    "eager": (),
    "eager_noexcept": (),
    "pre_dispatch_eager": (),
    "aot_eager": _AOT,
    "aot_eager_default_partitioner": _AOT,
    "aot_eager_decomp_partition": (*_AOT, *_DECOMPOSITIONS),
    "cudagraphs": _AOT,
}
"""Backend of torch that runs no pass of Inductor -> the modules whose settings and tables it does use."""


class OpaqueCall(NamedTuple):
    """A call in a graph of Dynamo of a Python function that Dynamo did not trace."""

    function: Any
    stack: str
    """Lines of the program, as torch prints them."""


def backend() -> Any:
    """The backend of the compile in progress on this thread; None outside of one."""
    output = _output()
    return None if output is None else output.compiler_fn


def used_by(backend: Any) -> tuple[str, ...]:
    """Beginnings of the names of the modules whose settings and tables act on what a backend compiles.

    All of torch's for Inductor, and for a backend of others, which may call it.
    """
    chosen = getattr(backend, "_torchdynamo_orig_backend", backend)
    chosen = getattr(chosen, "compiler_fn", chosen)
    for name, modules in _RUN_BY.items():
        if chosen is _lookup_backend(name):
            return modules
    return ("torch.",)


def settings(backend: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of the settings of AOTAutograd and Inductor that act on a compile; its `options` replace some."""
    values = {module: module.get_config_copy() for module in (_inductor_config, _functorch_config)}
    options = getattr(backend, "config", None)
    if isinstance(options, Mapping):
        values[_inductor_config].update(options)
    used = used_by(backend)
    for module, of_module in values.items():
        if not module.__name__.startswith(used):
            continue
        for name, value in of_module.items():
            if not name.startswith(_CHANGES_NO_CODE):
                yield f"{module.__name__}.{name}", value


def tables(backend: Any) -> Iterator[tuple[str, str, Any]]:
    """(table, op, function) of what is not torch's in the tables that the backend looks ops up in.

    The tables of Inductor are empty until it is imported.
    """
    used = used_by(backend)
    for module, name in _OP_TABLES:
        if not module.startswith(used):
            continue
        table = getattr(sys.modules.get(module), name, {})
        entries = table if isinstance(table, Mapping) else vars(table)
        for op, entry in list(entries.items()):
            # The closure of a function of torch's is not looked into: there are thousands, and torch's decorators name
            # what they wrap.
            function = inspect.unwrap(entry) if callable(entry) else entry
            if isinstance(function, FunctionType) and not makers.is_others(function):
                continue
            for made in makers.made_by_others(entry):
                yield f"{module}.{name}", str(op), made


def patterns(backend: Any) -> Iterator[tuple[str, Any]]:
    """(module, function) of what is not torch's in the patterns that Inductor looks for in graphs."""
    if not _PASSES.startswith(used_by(backend)):
        return
    if "torch._inductor.pattern_matcher" not in sys.modules:  # its passes may be imported without it; none has patterns
        return
    for name, module in list(sys.modules.items()):
        if not name.startswith(_PASSES):
            continue
        entries = chain.from_iterable(map(_pattern_entries, list(vars(module).values())))
        for made in makers.made_by_others(list(entries)):
            yield name, made


def _pattern_entries(value: Any) -> list[Any]:
    """What the entries of a `PatternMatcherPass` call, or of several; a pattern itself is a tree of many objects."""
    matcher = sys.modules["torch._inductor.pattern_matcher"]
    called: list[Any] = []
    members = [value]
    if isinstance(value, Mapping):
        members = list(value.values())
    elif isinstance(value, (list, tuple)):
        members = list(value)
    for passes in members:
        if not isinstance(passes, matcher.PatternMatcherPass):
            continue
        for entry in chain.from_iterable(list(passes.patterns.values())):
            called += [getattr(entry, name, None) for name in ("handler", "extra_check", "normalize_args")]
    return called


def opaque_calls() -> Iterator[OpaqueCall]:
    """Calls in the graph that Dynamo has just made whose target is a function or a module; an op is neither."""
    output = _output()
    if output is None:
        return
    modules = dict(output.nn_modules)
    inner = [module.graph for module in modules.values() if isinstance(module, torch.fx.GraphModule)]
    nodes = list(output.graph.nodes)
    for graph in inner:
        nodes += graph.nodes
    for node in nodes:
        stack = node.stack_trace or ""
        for function in _called(node, modules):
            yield OpaqueCall(function, stack)


def _called(node: torch.fx.Node, modules: Mapping[str, Any]) -> Iterator[Any]:
    """The function or module that a node calls; also the one behind `nonstrict_trace`, an attribute of the graph."""
    if node.op == "call_module":
        yield modules.get(str(node.target))
    elif node.op == "call_function":
        yield node.target
    else:
        return
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            yield modules.get(str(argument.target))


def _output() -> Any:
    try:
        return _InstructionTranslator.current_tx().output
    except AttributeError:  # torch raises it outside of a compile
        return None
