"""What Triton compiled of a kernel for a GPU in this process; seen on Triton 3.6.0 and 3.9.0.

name                                     why
JITFunction.device_caches                device -> (compiled kernels, ...), of launches outside of Inductor's code
CompiledKernel.asm, metadata, src        PTX and cubin, options, signature with constants and attributes

`tests/torch_api/test_binaries.py` fails when one of them moves.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from typing import Any

_OPTIONS = (
    "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid", "debug",
    "sanitize_overflow", "instrumentation_mode",
)  # fmt: skip
"""Options of a compile that change its code, as Triton names them; a version that lacks one has None for it."""
_SECTION = re.compile(r"\.section\s+\S+\s*\{.*?\}", re.DOTALL)
_OF_LINES = re.compile(r"\s*(\.loc\b|\.file\b|\$L__(tmp|func_begin|func_end)\d+:)")
_ELF = b"\x7fELF\x02\x01"
_NUM_HEX = 16


def compiled(kernel: Any) -> Iterator[tuple[str, str]]:
    """(hash of what it was compiled for, hashes of its PTX and machine code) for each variant that was launched."""
    for caches in dict(getattr(kernel, "device_caches", {})).values():
        for variant in list(caches[0].values()):
            if "ptx" in getattr(variant, "asm", {}):
                yield purpose(variant), f"{_hash(portable_ptx(variant.asm['ptx']))} {code_hash(variant.asm['cubin'])}"


def purpose(variant: Any) -> str:
    """Hash of the architecture, types, constants and alignment of the arguments and options of a compiled kernel."""
    source, options = variant.src, variant.metadata
    chosen = {name: getattr(options, name, None) for name in _OPTIONS}
    target = getattr(options.target, "arch", options.target)
    return _hash(repr((target, source.signature, source.constants, source.attrs, chosen)))


def portable_ptx(text: str) -> str:
    """PTX without comments and what says where its source is: lines, files, debug information."""
    lines = [line.partition("//")[0].rstrip() for line in _SECTION.sub("", text).splitlines()]
    return "\n".join(line for line in lines if line and not _OF_LINES.match(line))


def code_hash(cubin: bytes) -> str:
    """Hash of the machine code in a cubin, an ELF file, without names, lines and paths."""
    if cubin[: len(_ELF)] != _ELF:
        return _hash("no ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    names = sections[names_at][4]
    digest = hashlib.sha256()
    for name, _kind, _flags, _address, offset, length in sections:
        if cubin[names + name :].startswith(b".text"):
            digest.update(cubin[offset : offset + length])
    return digest.hexdigest()[:_NUM_HEX]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NUM_HEX]
