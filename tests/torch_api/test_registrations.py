"""The dispatcher says who registered an op and its kernels: torch's own are torch's, whatever their namespace."""

from __future__ import annotations

import _ctypes
import ctypes
import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpus import printed_by
from tpcompile.testing import run_on_ranks
from tpcompile.torch_api import registrations

_REGISTERING = (
    "torch._inductor.compile_fx", "torch.distributed._functional_collectives", "torch.distributed._symmetric_memory",
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.experimental",
    "torch.ao.quantization.fx._decomposed", "torch.nn.attention.flex_attention", "torch.nn.attention.varlen",
)  # fmt: skip
"""Modules of torch that register ops when they are imported."""


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Iterator[Callable[..., torch.library.Library]]:
    """Makes libraries that end with the test."""
    made: list[torch.library.Library] = []

    def make(namespace: str, kind: str) -> torch.library.Library:
        made.append(torch.library.Library(namespace, kind))
        return made[-1]

    yield make
    for one in made:
        one._destroy()


def strangers() -> list[str]:
    """Ops of this process that torch did not register, and those with a kernel that torch did not register."""
    for module in _REGISTERING:
        importlib.import_module(module)
    found: list[str] = []
    for name in registrations.all_ops():
        replaced = list(registrations.replaced_kernels(name))
        if registrations.whose_op(name) is not None or replaced:
            found.append(name)
    return found


def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.mark.slow
def test_torch_has_no_strangers_in_any_of_its_modules(tmp_path: Path) -> None:
    """In a process of its own: other tests import libraries that register ops."""
    program = """
from tests.torch_api.test_registrations import strangers
from tpcompile.torch_api import registrations

print(len(registrations.all_ops()) > 3000, strangers())
"""
    assert printed_by(program, tmp_path) == ["True []"]


@pytest.mark.parametrize("namespace", ["aten", "quantized", "inductor", "prims", "_c10d_functional"])
def test_an_op_in_a_namespace_of_torch_is_whose_file_registered_it(library: Any, namespace: str) -> None:
    library(namespace, "FRAGMENT").define("tpcompile_test(Tensor x) -> Tensor")
    place = registrations.whose_op(f"{namespace}::tpcompile_test")
    assert place is not None and place.file == __file__
    assert registrations.overloads(f"{namespace}::tpcompile_test") == [f"{namespace}::tpcompile_test"]


def test_an_op_of_this_package_is_not_torchs() -> None:
    """It is judged as any other: as a fast path with its certificate."""
    pytest.importorskip("triton")
    importlib.import_module("tpcompile.fastpath.kernels.all")
    place = registrations.whose_op("tpcompile::qk_sums")
    assert place is not None and place.file.endswith("fastpath/kernels/qk_norm.py")


def test_an_op_by_torch_library_define_has_the_file_of_its_fake_kernel() -> None:
    torch.library.define("inductor::tpcompile_defined", "(Tensor x) -> Tensor")
    place = registrations.whose_op("inductor::tpcompile_defined")
    assert place is not None and "torch.library" in registrations.told(place)
    torch.library.register_fake("inductor::tpcompile_defined")(torch.empty_like)
    place = registrations.whose_op("inductor::tpcompile_defined")
    assert place is not None and place.file == __file__


@pytest.mark.parametrize("key", ["CPU", "CUDA", "AutogradCPU", "CompositeExplicitAutograd"])
def test_a_kernel_that_replaces_torchs_has_its_key_and_file(library: Any, key: str) -> None:
    library("aten", "IMPL").impl("rsqrt", triple, key)
    ((found, place),) = registrations.replaced_kernels("aten::rsqrt")
    assert (found.removesuffix("[alias]"), place.file) == (key, __file__)
    assert registrations.whose_op("aten::rsqrt") is None


@pytest.mark.parametrize("key", ["Meta", "PrivateUse1"])
def test_kernels_of_shapes_and_of_devices_that_torch_does_not_have_replace_nothing(library: Any, key: str) -> None:
    library("aten", "IMPL").impl("erfinv", triple, key, allow_override=True)
    assert list(registrations.replaced_kernels("aten::erfinv")) == []


def places_by_torch_library_impl() -> tuple[str, str]:
    """Where a kernel of `torch.library.impl` is said to be from, not watched and watched; both stay in this process."""
    torch.library.impl("aten::digamma", "CPU")(triple)
    ((_, place),) = registrations.replaced_kernels("aten::digamma")
    with registrations.functions_noted():
        torch.library.impl("aten::erfc", "CPU")(triple)
    ((_, watched),) = registrations.replaced_kernels("aten::erfc")
    return registrations.told(place), str(watched)


def test_a_kernel_by_torch_library_impl_is_named_where_it_was_watched() -> None:
    """torch notes its own file."""
    ((place, watched),) = run_on_ranks(places_by_torch_library_impl, world_size=1)
    assert "torch.library" in place
    assert watched == str(registrations.Place(__file__, triple.__code__.co_firstlineno))


def files_of_a_replaced_custom_op() -> list[str]:
    """Files whose kernels an op of torch has after one of them was replaced; it stays replaced in this process."""
    torch.library.register_kernel("prims::erf_inv", "cpu")(triple)
    return sorted({place.file for _, place in registrations.replaced_kernels("prims::erf_inv")})


def test_the_kernel_of_a_custom_op_of_torch_may_be_replaced_too() -> None:
    assert run_on_ranks(files_of_a_replaced_custom_op, world_size=1) == [[__file__]]


def found(*, thorough: bool = False) -> set[tuple[str, str]]:
    return {(op, key) for op, key, _ in registrations.all_replaced_kernels(thorough=thorough)}


def test_a_kernel_by_py_impl_is_listed() -> None:
    op = torch.ops.aten.special_i0e.default
    op.py_impl(torch._C.DispatchKey.CPU)(triple)
    try:
        assert ("aten::special_i0e", "CPU in Python") in found()
    finally:
        del op.py_kernels[torch._C.DispatchKey.CPU]


def test_a_registration_is_found_by_the_next_look(library: Any) -> None:
    assert ("aten::special_i1", "CPU") not in found()
    library("aten", "IMPL").impl("special_i1", triple, "CPU")
    assert ("aten::special_i1", "CPU") in found()


def looks_around_a_library_in_cpp() -> tuple[bool, bool, list[str]]:
    """Whether the kernel is found before and after it is registered, and where; the last look stays in the cache."""
    library = torch._C._dispatch_library("IMPL", "aten", "CPU", "/build/fused/csrc/norm.cpp", 42)
    op = ("aten::special_i1e", "CPU")
    before = op in found(thorough=True)
    library.impl("special_i1e", "CPU", triple)
    registrations._num_loads = lambda: 10**6  # as after it was loaded
    return before, op in found(thorough=True), [str(place) for _, place in registrations.replaced_kernels(op[0])]


def test_kernels_of_a_library_in_cpp_are_found_by_a_thorough_look() -> None:
    """Loading it adds no op and no name in Python; the dispatcher has the file of its source."""
    (looks,) = run_on_ranks(looks_around_a_library_in_cpp, world_size=1)
    assert looks == (False, True, ["/build/fused/csrc/norm.cpp:42"])


def test_loaded_libraries_are_counted(tmp_path: Path) -> None:
    before = registrations._num_loads()
    copy = shutil.copy(_ctypes.__file__, tmp_path / "copy.so")
    ctypes.CDLL(str(copy))
    assert registrations._num_loads() == before + 1 > 1


def test_an_op_that_nobody_has_is_not_torchs_and_one_of_torchscript_is() -> None:
    assert registrations.whose_op("mylib::gone") is not None
    assert registrations.whose_op("aten::len.t") is None
