"""What Triton compiled of a kernel: found where it keeps it, equal wherever its source is, different for other code."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpus import printed_by
from tpcompile.torch_api import binaries

KERNEL = """
import triton
import triton.language as tl
@triton.jit
def add_kernel(x, y, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < size) + 1.5, mask=at < size)
"""


def built(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, *, warps: int = 4
) -> tuple[Any, list[tuple[str, str]]]:
    """The kernel compiled for an H100, in the caches of a launch."""
    folder.mkdir()
    (folder / "built_kernel.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "built_kernel", raising=False)
    importlib.invalidate_caches()
    kernel = importlib.import_module("built_kernel").add_kernel
    source = ASTSource(kernel, {"x": "*fp32", "y": "*fp32", "size": "i32", "BLOCK": "constexpr"}, {(3,): 256})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    kernel.device_caches[0] = ({"key": compiled}, {}, None, None, None)
    return compiled, list(binaries.compiled(kernel))


@pytest.mark.slow
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
def test_the_code_does_not_depend_on_the_place_and_changes_with_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compiled, here = built(tmp_path / "here", KERNEL, monkeypatch)
    assert str(tmp_path) in compiled.asm["ptx"]
    assert str(tmp_path) not in binaries.portable_ptx(compiled.asm["ptx"])
    moved, there = built(tmp_path / "there", "# a comment\n" + KERNEL, monkeypatch)
    assert moved.asm["ptx"] != compiled.asm["ptx"] and there == here
    _, edited = built(tmp_path / "edited", KERNEL.replace("1.5", "2.5"), monkeypatch)
    assert edited[0][0] == here[0][0]
    assert all(a != b for a, b in zip(edited[0][1].split(), here[0][1].split(), strict=True))
    _, wider = built(tmp_path / "wider", KERNEL, monkeypatch, warps=8)
    assert wider[0][0] != here[0][0]


def elf(text: bytes, debug: bytes) -> bytes:
    """An ELF file with machine code and debug information."""
    names = b"\0.text.kernel\0.debug_line\0.shstrtab\0"
    bodies = [b"", text, debug, names]
    starts = [64 + sum(map(len, bodies[:at])) for at in range(len(bodies))]
    places = [0, 1, 14, 26]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", place, 1, 0, 0, start, len(body), 0, 0, 1, 0)
        for place, start, body in zip(places, starts, bodies, strict=True)
    )
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + sum(map(len, bodies)))
    return head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 4, 3) + b"".join(bodies) + table


def test_of_a_cubin_the_machine_code_counts() -> None:
    known = binaries.code_hash(elf(b"code", b"/here"))
    assert known == binaries.code_hash(elf(b"code", b"/else/where"))
    assert known != binaries.code_hash(elf(b"edit", b"/here"))


def test_what_was_not_compiled_for_a_gpu_has_no_code() -> None:
    assert list(binaries.compiled(SimpleNamespace())) == []
    interpreted = SimpleNamespace(device_caches={0: ({"key": SimpleNamespace(asm={})},)})
    assert list(binaries.compiled(interpreted)) == []


@pytest.mark.gpu(1)
def test_a_launch_leaves_what_was_compiled(tmp_path: Path) -> None:
    program = """
import torch
from tests.fastpath import kernels
from tests.gpus import printed_by
from tpcompile.torch_api import binaries

kernels.launch(torch.ones(4, device="cuda"))
found = dict(binaries.compiled(kernels.norm_kernel))
print(bool(found) and all(len(code.split()) == 2 for code in found.values()))
"""
    assert printed_by(program, tmp_path) == ["True"]
