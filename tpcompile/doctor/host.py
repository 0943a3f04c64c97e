"""What the operating system knows of this machine -> findings."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tpcompile.doctor.finding import Finding, fail, warn
from tpcompile.errors import PreflightError
from tpcompile.launch import cxx_compiler

_GIB = 1 << 30
_MIN_SHM_GIB = 1.0
"""A container has 64 MB by default; NCCL and the workers of a DataLoader take more."""
_DEFAULT_PORT = 29500
"""That of torchrun without --standalone and --master-port."""
_TIMEOUT_S = 10.0


def python() -> Finding:
    """The interpreter, and whether executed lines are recorded by default."""
    version = platform.python_version_tuple()
    flow = "" if tuple(map(int, version[:2])) >= (3, 12) else "; executed lines are recorded by default from 3.12 on"
    return Finding(name="python", says=f"{platform.python_version()}{flow}")


def compiler(environ: Mapping[str, str]) -> Finding:
    """The C++ compiler, which Inductor needs on a CPU and Triton for its launchers."""
    try:
        name = cxx_compiler(environ)
    except PreflightError as error:
        problem, _, todo = str(error).partition("; ")
        return fail("compiler", problem, f"{todo} (Debian: apt install g++)")
    try:
        asked = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return fail("compiler", f"{name} --version failed: {error}", "install g++, or set CXX to one that runs")
    return Finding(name="compiler", says=(asked.stdout.splitlines() or [name])[0])


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """The size of /dev/shm."""
    if not folder.is_dir():
        return warn(
            "shared memory", f"there is no {folder}", "NCCL and DataLoader workers need it: mount a tmpfs there"
        )
    usage = shutil.disk_usage(folder)
    says = f"{folder}: {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _MIN_SHM_GIB * _GIB:
        return warn("shared memory", says, "make it larger: docker run --shm-size=8g, or --ipc=host")
    return Finding(name="shared memory", says=says)


def addresses() -> Finding:
    """Whether localhost can be bound, and whether this host's name has an address, as gloo looks it up."""
    try:
        with socket.socket() as bound:
            bound.bind(("localhost", 0))
    except OSError as error:
        return fail(
            "addresses", f"no port of localhost can be bound: {error}", "add `127.0.0.1 localhost` to /etc/hosts"
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        todo = f"add `127.0.0.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return warn("addresses", f"the name of this host, {name}, has no address: {error}", todo)
    return Finding(name="addresses", says=f"localhost can be bound; {name} is {address}")


def port(number: int = _DEFAULT_PORT) -> Finding:
    """Whether torchrun's default port is free."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("", number))
        except OSError as error:
            todo = "start jobs by torchrun --standalone, or with a --master-port of their own"
            return warn(
                "port", f"{number}, the default of torchrun, cannot be bound: {os.strerror(error.errno or 0)}", todo
            )
    return Finding(name="port", says=f"{number}, the default of torchrun, is free")
