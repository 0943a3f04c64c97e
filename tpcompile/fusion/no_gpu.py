"""An architecture -> this process sees one GPU of it, which computes nothing; before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

from tpcompile.errors import ConfigError, PreflightError
from tpcompile.private_folder import cache_folder, made_once

ARCHITECTURES = ("sm_90", "sm_80")
_SOURCE = Path(__file__).with_name("no_gpu.cpp")


def pretend(arch: str) -> None:
    """Load a CUDA device that computes nothing, then torch, and give it the properties of that architecture.

    For the rest of the process. Raises ConfigError for an architecture that is not known or where torch is imported
    already, PreflightError without a C++ compiler.
    """
    if arch not in ARCHITECTURES:
        raise ConfigError(f"--arch {arch}: known are {', '.join(ARCHITECTURES)}")
    if "torch" in sys.modules:
        raise ConfigError(f"--arch {arch}: torch is imported already; use a process of its own")
    library = ctypes.CDLL(str(_built(_torch_folder())), mode=ctypes.RTLD_GLOBAL)
    from tpcompile.torch_api import no_gpu

    library.use_no_gpu()
    no_gpu.pretend(arch)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PreflightError("torch is not installed")
    return Path(spec.origin).parent


def _library(folder: Path) -> Path:
    """File of the library for the torch in that folder; it finds torch's libraries there, and nowhere else."""
    content = "\n".join([str(folder), (folder / "version.py").read_text(), _SOURCE.read_text()])
    return cache_folder("no_gpu") / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"


def _built(folder: Path) -> Path:
    """The library, built once for each torch."""

    def build(built: Path) -> None:
        include = folder / "include"
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}", str(_SOURCE), "-o", str(built)]
        command += [f"-I{include / 'torch/csrc/api/include'}"]
        command += [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise PreflightError("--arch needs g++, and there is none; install it (Debian: apt install g++)") from None
        if done.returncode:
            raise PreflightError(f"--arch: g++ failed: {done.stderr.strip().splitlines()[-1]}")

    return made_once(_library(folder), build)
