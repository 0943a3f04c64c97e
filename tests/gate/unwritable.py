"""A torchrun target: the gate, whose run directory cannot be written from a given phase on.

torchrun ... tests/gate/unwritable.py HOW MOMENT FLAGS

HOW is `full`, its disk, or `gone`, with a file in its place; `cache-full` and `cache-gone` are the same of Inductor's
cache directory in place of the run directory. MOMENT is a phase, or the file that would be written then.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch._inductor.config
import torch.distributed as dist

from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.in_rank import main
from tpcompile.gate.status import StatusBoard

WRITES = {
    "config.json": "write_config", "record.json": "write_record", "verdict.json": "write_verdict",
    "junit.xml": "write_text",
}  # fmt: skip
"""Moment -> the method of RunDir that is called then."""
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def spoil(how: str, run: RunDir) -> None:
    """Make the run directory unwritable; on every rank, the first to come does it."""
    folder = run.path
    if how.startswith("cache-"):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        dist.barrier()  # a rank in the phase before makes the folder, and would be the first to fail
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        fill(folder) if how.endswith("full") else replace(folder)


def fill(folder: Path) -> None:
    """Take every byte of the file system that a folder is in, which must be a small one made for it."""
    size_bytes = shutil.disk_usage(folder.parent).total
    assert size_bytes < 2**26, f"{folder.parent} is in a file system of {size_bytes} bytes"
    with (folder.parent / f"filling_{os.getpid()}").open("wb", buffering=0) as file:
        size = 65536
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def replace(folder: Path) -> None:
    """Put a file where the folder was, in one step: a rank that writes in between would make the folder again."""
    file = folder.with_suffix(f".{os.getpid()}")
    file.write_text("")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(file), _HERE, os.fsencode(folder), _EXCHANGE):
        raise OSError(ctypes.get_errno(), "cannot exchange", str(folder))


def before(owner: type, name: str, action: Callable[..., object]) -> None:
    """Call `action` with the arguments of a method ahead of it."""
    method = getattr(owner, name)

    def both(*given: Any, **named: Any) -> Any:
        action(*given)
        return method(*given, **named)

    setattr(owner, name, both)


if __name__ == "__main__":
    how, moment = sys.argv[1:3]
    del sys.argv[1:3]
    torch._inductor.config.cpp.simdlen = 1  # half the time in the C++ compiler
    if moment in WRITES:
        before(RunDir, WRITES[moment], lambda run, *_: spoil(how, run))
    else:
        before(StatusBoard, "enter", lambda board, phase: spoil(how, board._run_dir) if phase == moment else None)
    raise SystemExit(main(__doc__ or ""))
