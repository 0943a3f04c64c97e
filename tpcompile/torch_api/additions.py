"""What a program adds to the compiler, as torch keeps it; private names, seen on torch 2.11.0 and 2.13.0.

    name                                        why
    symbolic_convert.InstructionTranslator      `current_tx()`: the backend, and the graph that Dynamo has just made
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
from torch._dynamo.symbolic_convert import InstructionTranslator as _InstructionTranslator

from tpcompile.torch_api import makers

_CHANGES_NO_CODE = ("trace.",)
"""Settings of Inductor whose functions are told about what was compiled."""
_OP_TABLES = (
    ("torch._inductor.lowering", "lowerings"),
    ("torch._inductor.lowering", "user_lowerings"),
    ("torch._inductor.decomposition", "decompositions"),
    ("torch._inductor.codegen.common", "device_codegens"),
    ("torch._inductor.select_algorithm", "extern_kernels"),
    ("torch._decomp", "decomposition_table"),
)
_PASSES = "torch._inductor.fx_passes."


class OpaqueCall(NamedTuple):
    """A call in a graph of Dynamo of a Python function that Dynamo did not trace."""

    function: Any
    stack: str
    """Lines of the program, as torch prints them."""


def backend() -> Any:
    """The backend of the compile in progress on this thread; None outside of one."""
    output = _output()
    return None if output is None else output.compiler_fn


def settings(backend: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of the settings of AOTAutograd and Inductor that may hold a function, and of `options`."""
    for module in (_inductor_config, _functorch_config):
        for name, value in module.get_config_copy().items():
            if _may_hold_code(value) and not name.startswith(_CHANGES_NO_CODE):
                yield f"{module.__name__}.{name}", value
    options = getattr(backend, "config", None)
    for name, value in (options if isinstance(options, Mapping) else {}).items():
        if _may_hold_code(value):
            yield f"{_inductor_config.__name__}.{name}", value


def _may_hold_code(value: Any) -> bool:
    return value is not None and not isinstance(value, (bool, int, float, str))


def tables() -> Iterator[tuple[str, str, Any]]:
    """(table, op, function) of what is not torch's in the tables that the compiler looks ops up in.

    The tables of Inductor are empty until it is imported.
    """
    for module, name in _OP_TABLES:
        table = getattr(sys.modules.get(module), name, {})
        for op, entry in list((table if isinstance(table, Mapping) else vars(table)).items()):
            if not _is_torchs_function(entry):
                for made in makers.made_by_others(entry):
                    yield f"{module}.{name}", str(op), made


def _is_torchs_function(entry: Any) -> bool:
    """Without a look into its closure: there are thousands, and torch's decorators name what they wrap."""
    function = inspect.unwrap(entry) if callable(entry) else entry
    return isinstance(function, FunctionType) and not makers.is_others(function)


def patterns() -> Iterator[tuple[str, Any]]:
    """(module, function) of what is not torch's in the patterns that Inductor looks for in graphs."""
    matcher = sys.modules.get("torch._inductor.pattern_matcher")
    if matcher is None:
        return
    for module in [name for name in sys.modules if name.startswith(_PASSES)]:
        for value in list(vars(sys.modules[module]).values()):
            for each in _members(value):
                if isinstance(each, matcher.PatternMatcherPass):
                    entries = chain.from_iterable(list(each.patterns.values()))
                    for made in makers.made_by_others(list(map(_functions, entries))):
                        yield module, made


def _functions(entry: Any) -> list[Any]:
    """What a pattern's entry calls; the pattern itself is a tree of many objects."""
    return [getattr(entry, name, None) for name in ("handler", "extra_check", "normalize_args")]


def _members(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def opaque_calls() -> Iterator[OpaqueCall]:
    """Calls in the graph that Dynamo has just made whose target is a function or a module; an op is neither."""
    output = _output()
    if output is None:
        return
    graphs = [output.graph]
    modules = dict(output.nn_modules or {})
    graphs += [module.graph for module in modules.values() if isinstance(module, torch.fx.GraphModule)]
    for graph in graphs:
        for node in graph.nodes:
            target = modules.get(node.target) if node.op == "call_module" else node.target
            if node.op in ("call_function", "call_module") and callable(target):
                for function in (target, *_traced_leniently(node, modules)):
                    yield OpaqueCall(function, node.meta.get("stack_trace") or node.stack_trace or "")


def _traced_leniently(node: torch.fx.Node, modules: Mapping[str, Any]) -> Iterator[Any]:
    """The function behind a call through `nonstrict_trace`, which is an attribute of the graph."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            yield modules.get(str(argument.target))


def _output() -> Any:
    try:
        return _InstructionTranslator.current_tx().output
    except AttributeError:  # torch raises it outside of a compile
        return None
