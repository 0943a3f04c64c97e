"""Generated Triton kernels of this process -> registers, spills and shared memory: torch 2.11.0 and 2.13.0.

    name                                           why
    PyCodeCache.modules, .load                     the generated code that is loaded, with its kernels
    CachingAutotuner.launchers                     the configurations that can run; one after autotuning
    launcher.config, .n_regs, .n_spills, .shared   what one needs, read by the driver when it was loaded
    CachingAutotuner.configs, ._precompile_config  what would be compiled, and how
    config.use_static_triton_launcher              False: the result holds the compiled code
    triton_helpers.set_driver_to_gpu               a kernel's module asks for a GPU when it is loaded
    cuobjdump in Triton's wheel                    reads the registers out of the compiled code

`tests/torch_api/test_resources.py` fails when one of them moves. Spills are 4-byte words of the frame of a thread, as
Triton counts them; shared memory is what a launch asks for.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Configurations = list[dict[str, Any]]
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<frame_bytes>\d+)")


def generated_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """The text of each loaded module of generated code, and its kernels by name, as Inductor's autotuners."""
    from torch._inductor.codecache import PyCodeCache

    for module in PyCodeCache.modules:
        kernels = {}
        for name, value in vars(module).items():
            is_autotuner = hasattr(value, "launchers") and hasattr(value, "compile_results")
            if is_autotuner:
                kernels[name] = value
        path = Path(module.__file__ or "")
        if kernels and path.is_file():
            yield path.read_text(), kernels


def of_launched(kernel: Any) -> Configurations:
    """What the configuration needs that a kernel runs with; empty where it did not run on a GPU."""
    if len(kernel.launchers) != 1:  # it was not called: autotuning has not chosen
        return []
    (launcher,) = kernel.launchers
    if launcher.n_regs is None:
        return []
    return [_needs(launcher.config, launcher.n_regs, launcher.n_spills, launcher.shared)]


@functools.cache
def of_source(source: str, name: str) -> Configurations:
    """What each configuration needs that autotuning would choose among, compiled for the GPU that is not there.

    After `tpcompile.torch_api.no_gpu.pretend`; takes about a second for each. Configurations that do not compile are
    left out, as Inductor leaves them out.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None
    kernel = getattr(PyCodeCache.load(source), name)
    found = []
    for config in kernel.configs:
        found += _compiled(kernel, config)
    return found


def _compiled(kernel: Any, config: Any) -> Configurations:
    from torch._inductor import config as inductor
    from torch._inductor.runtime.triton_heuristics import OutOfResources, PTXASError

    try:
        with inductor.patch(use_static_triton_launcher=False):  # the result of the other launcher holds no code
            binary = kernel._precompile_config(config).kernel
    except (OutOfResources, PTXASError):
        return []
    # Registers of a thread, and bytes of its frame.
    import triton.backends.nvidia as nvidia

    tool = Path(next(iter(nvidia.__path__)), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = _USAGE.search(done.stdout + done.stderr)
    assert found is not None, f"cuobjdump printed no registers: {done.stdout[:200]}"
    registers, frame_bytes = int(found["registers"]), int(found["frame_bytes"])
    return [_needs(config, registers, frame_bytes // 4, binary.metadata.shared)]


def _needs(config: Any, registers: int, spills: int, shared_bytes: int) -> dict[str, Any]:
    """The configuration is written `R0_BLOCK=1024 XBLOCK=1 num_stages=1 num_warps=8`."""
    options = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return {
        "configuration": " ".join(f"{name}={value}" for name, value in sorted(options.items())),
        "registers": registers,
        "spills": spills,
        "shared_bytes": shared_bytes,
    }
