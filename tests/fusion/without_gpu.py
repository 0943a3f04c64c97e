"""`python -m tests.fusion.without_gpu COMMANDS`: arguments of Python by name -> how each ended, as JSON.

Each runs in a fork of this process, which sees a GPU that computes nothing and has imported torch, for 8 s of CPU time.
A command finds no torch, and gets this one when it asks for such a GPU itself, which it must do first.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tpcompile.fusion import no_gpu

ARCH = "sm_90"


def ended(command: list[str], folder: Path) -> dict[str, Any]:
    files = [folder / name for name in ("stdout", "stderr")]
    pid = os.fork()
    if pid == 0:
        for stream, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        _run(command)
    _, status = os.waitpid(pid, 0)
    stdout, stderr = (file.read_text() for file in files)
    return {"returncode": os.waitstatus_to_exitcode(status), "stdout": stdout, "stderr": stderr}


def _run(command: list[str]) -> NoReturn:
    code: Any = 1
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _compile_once() -> None:
    """What torch does once in each process, 0.8 s: the hash of all of Triton, Inductor's patterns, what it imports."""
    import torch._inductor.compile_fx
    import torch.distributed.tensor.parallel

    from tpcompile.torch_api.generated import generating_backend, without_caches
    from tpcompile.torch_api.no_gpu import empty_tensors

    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # see tests/preloaded.py
    with empty_tensors(), without_caches(), torch.no_grad():
        x = torch.empty(16, 16, device="cuda")
        torch.compile(lambda x: (x @ x).relu(), backend=generating_backend())(x)
    torch.compiler.reset()


def main(commands: dict[str, list[str]]) -> None:
    no_gpu.pretend(ARCH)
    _compile_once()
    names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
    hidden = {name: sys.modules.pop(name) for name in names}

    def pretend(arch: str) -> None:
        assert arch == ARCH
        assert "torch" not in sys.modules, "torch is imported already"
        sys.modules.update(hidden)

    no_gpu.pretend = pretend
    with TemporaryDirectory() as folder:
        print(json.dumps({name: ended(command, Path(folder)) for name, command in commands.items()}), flush=True)
    os._exit(0)  # without taking apart all that was imported


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
