"""A C++ compiler -> one that compiles a source once in a session; the next time its output is copied.

Tests give ranks empty caches, and each rank has its own: most of what the compiler was started for was compiled before.
What Inductor itself keeps, finds and misses stays as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LEVELS = {"-O3": "-O1"}
"""To make kernels quick is a tenth of a compilation, and those of tests compute little; one is shown to be a win."""
FOLDER = "TPCOMPILE_TEST_CXX"
"""In the environment: where the outputs of this session are."""


def install() -> Path | None:
    """Make CXX that compiler, for this process and those it starts; the folder, which the caller removes.

    None where an outer process has done so, or where there is no compiler.
    """
    real = shutil.which(os.environ.get("CXX", "g++"))
    if FOLDER in os.environ or real is None:
        return None
    folder = tempfile.mkdtemp(prefix="tpcompile-compiled-")
    os.environ |= {FOLDER: folder, "CXX": str(_wrapper(real))}
    return Path(folder)


def _wrapper(real: str) -> Path:
    """Always in the same place: Inductor precompiles its headers again, 6 s, for a compiler with a different path."""
    command = shlex.join([sys.executable, "-IS", __file__, real])
    place = hashlib.sha256(command.encode()).hexdigest()[:12]
    wrapper = Path(tempfile.gettempdir(), f"tpcompile-cxx-{place}", Path(real).name)  # Inductor goes by its name
    if not wrapper.exists():
        wrapper.parent.mkdir(exist_ok=True)
        partial = wrapper.with_suffix(f".{os.getpid()}")
        partial.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        partial.chmod(0o755)
        partial.rename(wrapper)
    return wrapper


def compile_once(folder: Path, compiler: str, arguments: Sequence[str]) -> int:
    """Run the compiler, or copy what it made of the same source with the same arguments; its exit code."""
    command = [compiler, *arguments]
    sources = [argument for argument in arguments if argument.endswith(".cpp")]
    if len(sources) != 1 or "-o" not in arguments:
        return subprocess.call(command)
    output = Path(arguments[arguments.index("-o") + 1])
    paths = {sources[0], str(output)}
    rest = [argument for argument in arguments if argument not in paths]
    key = hashlib.sha256(repr(rest).encode() + Path(sources[0]).read_bytes()).hexdigest()
    kept, partial = folder / key, folder / f"{key}.partial"
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other rank compiles it at the same time
        if kept.exists():
            with suppress(OSError):  # a full disk: the compiler says so in its own words
                shutil.copy(kept, output)
                return 0
        code = subprocess.call(command)
        if code == 0:
            with suppress(OSError):
                shutil.copy(output, partial)
                partial.rename(kept)
        return code


if __name__ == "__main__":
    _, compiler, *given = sys.argv
    words = [LEVELS.get(word, word) for word in given]
    if FOLDER not in os.environ:  # a test starts it with few variables
        sys.exit(subprocess.call([compiler, *words]))
    sys.exit(compile_once(Path(os.environ[FOLDER]), compiler, words))
