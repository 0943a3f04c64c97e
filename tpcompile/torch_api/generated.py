"""Code is generated, and the graph runs instead of it; the stacks of generated code: torch 2.11.0 and 2.13.0.

    name                                          why
    compile_fx(inner_compile=)                    what is called in place of the generated code
    AsyncCompile.triton, .cpp_pybinding           a kernel is not compiled
    _dynamo.backends.registry.lookup_backend      the function of a backend's name
    _dynamo_dynamic_indices, ...                  marks of `mark_dynamic`
    custom_graph_pass.CustomGraphPass             a pass that edits the graph before code is generated
    PyCodeCache.linemaps                          file of generated code -> (its lines, the stack of each)

`tests/torch_api/test_generated.py` fails when one of the names moves.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from tpcompile.torch_api.passes import CustomGraphPass


def replace_stacks(path: str, replaced: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """Replace the stacks that the flight recorder and the profiler show for the code in that file; empty for none."""
    from torch._inductor.codecache import PyCodeCache

    found = PyCodeCache.linemaps.get(path)
    if found:
        lines, stacks = found
        texts = [stack or "" for stack in stacks]
        PyCodeCache.linemaps[path] = [lines, tuple(replaced(texts))]


def generating_backend(graph_pass: CustomGraphPass | None = None) -> Callable[..., Any]:
    """A backend of torch.compile that generates code and runs the graph, also on tensors that hold nothing.

    The code is that of the graph as the pass leaves it; what runs is the graph as it was.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        same = copy.deepcopy(graph)
        compile_fx_inner(graph, inputs, **options)

        def run(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()
            mode = next((one.fake_mode for one in given if hasattr(one, "fake_mode")), nullcontext())
            with mode:
                out = torch.fx.Interpreter(same).run(*given)
            return list(out) if isinstance(out, list | tuple) else [out]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        settings = dict(options.get("options") or {})
        if graph_pass is not None:
            settings["post_grad_custom_pre_pass"] = graph_pass
        return compile_fx(graph, inputs, inner_compile=inner, config_patches=settings or None)

    return backend


def chosen_backend(lowers: Callable[[], bool], *, generates: bool) -> Callable[..., Any]:
    """A backend that lowers, up to generated code or to AOTAutograd's graphs, where `lowers()` says so at a compile."""
    from torch._dynamo.backends.registry import lookup_backend

    lowered = generating_backend() if generates else lookup_backend("aot_eager")
    plain = lookup_backend("eager")

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        return (lowered if lowers() else plain)(graph, inputs, **options)

    return backend


@contextmanager
def without_caches() -> Iterator[None]:
    """Every graph is compiled anew."""
    with torch.compiler.config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        yield


@contextmanager
def uncompiled_kernels() -> Iterator[None]:
    """Generated kernels are not compiled, and must not run."""
    from torch._inductor.async_compile import AsyncCompile

    def kept(*_: Any, **__: Any) -> Any:
        return lambda *_: None  # stands for a compiled kernel

    with ExitStack() as stack:
        for name in ("triton", "cpp_pybinding"):
            stack.enter_context(mock.patch.object(AsyncCompile, name, kept))
        yield


_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_unbacked_indices",
    "_has_dynamo_dim_marking",  # torch 2.13
)


@contextmanager
def static_shapes(inputs: Any) -> Iterator[None]:
    """Every size is a constant of the graph, also one that an input of the program marks as dynamic."""
    leaves = tree_leaves(inputs)
    for value, mark in product(leaves, _MARKS):
        if hasattr(value, mark):
            delattr(value, mark)
    is_static = torch._dynamo.config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False)
    with is_static:
        yield
