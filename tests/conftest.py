from __future__ import annotations

import atexit
import gc
import inspect
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any
from zlib import crc32

import _pytest.runner
import pytest

from tests import compiler, forked, workers
from tpcompile.frames import with_room
from tpcompile.launch import count_gpus

pytest_plugins = [
    "tpcompile.pytest_plugin"
]  # its entry point has the same name: an installed package registers it once

# Clients need frameworks that are in an environment of their own: `scripts/clients.sh` runs them, and says so here.
collect_ignore = [] if os.environ.get("TPCOMPILE_CLIENTS") else ["clients"]

# Inductor compiles and loads a probe for each vector instruction set, once per cache; torch 2.11 imports torch in a new
# process for each. Every rank with a cache of its own would wait for that. Read when Inductor is imported.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# A pool of compile workers imports torch once more for each rank, to compile a handful of small kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Dynamo looks for garbage after each compile: a twentieth of a gate's time in a process that has imported torch.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Ranks are CPU processes, forked from one that has imported torch, which CUDA does not survive, and a GPU that one of
# them finds would change what it does: only tests that are marked `gpu` see GPUs.
GPUS = os.environ.setdefault(
    "TPCOMPILE_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count_gpus())))
)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Ranks and pytest workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([forked.STARTUP, *forked.CALLERS])

COMPILED = compiler.install()
"""What this process removes at its end."""

ENVIRON = dict(os.environ)
"""What every test and rank finds; one that needs more sets it for itself."""

# Importing torch and all tests makes objects that stay: looking for garbage among them is a fifth of a collection.
gc.disable()
with_room(_pytest.runner.runtestprotocol)  # tests compile here as well
# What is frozen at the end of Python is never dropped, and Triton's bindings complain.
atexit.register(gc.unfreeze)


def pytest_collection_finish() -> None:
    """From the first test on, garbage is collected as ever, and processes that are forked can run a backward.

    With a torch that was built for CUDA and no GPU in sight, tracing puts a fake one there. Were the first backward to
    come after that, autograd would start a thread for it, and none of its threads survives a fork.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.ones((), requires_grad=True).backward()
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *_: 0.0  # see tests/preloaded.py
    gc.freeze()  # pytest looks for garbage twice at its end, half a second each with all that was imported
    gc.set_threshold(200_000, 50, 1000)
    gc.enable()
    if changed := changed_since(ENVIRON):
        raise pytest.UsageError(f"a test module sets {', '.join(changed)} for all others when it is imported")


def changed_since(before: Mapping[str, str]) -> list[str]:
    """Names of environment variables that differ; pytest has its own, and torch names its cache when it is imported."""
    names = sorted({*before, *os.environ} - {"TORCHINDUCTOR_CACHE_DIR"})
    return [name for name in names if before.get(name) != os.environ.get(name) and not name.startswith("PYTEST_")]


def pytest_unconfigure() -> None:
    if COMPILED is not None:
        shutil.rmtree(COMPILED, ignore_errors=True)


STARTERS = {"run_on_ranks", "run_python", "torchrun", "run_case", "fuzz"}
"""What starts processes that compile; `-m "not ranks"` leaves out the tests that come to one of them."""


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed to the workers in their order here: xdist would begin with those of many, quick tests."""
    config.option.loadscopereorder = False
    forked.use(config)
    if not GPUS:  # CUDA that was looked for does not survive a fork
        workers.fork_from(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start ranks, by themselves or by a fixture, and order all."""
    known: dict[tuple[Any, ...], bool] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        functions = [item.function]
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            functions += [fixture.func for fixture in fixtures]
        key = tuple(functions)  # cases of a test have the same
        if key not in known:
            known[key] = starts_ranks(functions)
        if known[key] or item.get_closest_marker("tp"):
            item.add_marker("ranks")
    items[:] = longest_first(items)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files with the longest tests come first: a worker that is left with a long one at the end works alone.

    Those of a folder are apart: they compute alike or wait alike, and cores are idle while all workers wait.
    """
    lengths: dict[Path, int] = defaultdict(int)
    for item in items:
        lengths[item.path] = max(lengths[item.path], length_of(item))
    return sorted(
        items, key=lambda item: (-lengths[item.path], crc32(str(item.path.relative_to(forked.ROOT)).encode()))
    )


def length_of(item: pytest.Item) -> int:
    """2 for slow tests and those of long files, 1 for others that start ranks."""
    marks = {mark.name for mark in item.iter_markers()}
    return 2 if marks & {"slow", "long"} else int("ranks" in marks)


def starts_ranks(functions: Iterable[Any]) -> bool:
    """Does one of these functions, or one of the tests' that it names, start ranks?"""
    seen: set[str] = set()
    left = list(functions)
    while left:
        function = inspect.unwrap(left.pop())
        if not inspect.isfunction(function) or not function.__module__.startswith("tests."):
            continue
        name = f"{function.__module__}.{function.__qualname__}"
        if name in seen:
            continue
        seen.add(name)
        names = names_in(function.__code__)
        if STARTERS & names:
            return True
        left += [function.__globals__[name] for name in names & function.__globals__.keys()]
    return False


def names_in(code: CodeType) -> set[str]:
    """Globals and attributes that a function uses, in its comprehensions as well."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`@pytest.mark.gpu(n)`: see the GPUs, or skip where there are fewer than n."""
    mark = request.node.get_closest_marker("gpu")
    if mark is None:
        return
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS)
    if count_gpus() < mark.args[0]:
        pytest.skip(f"needs {mark.args[0]} GPU(s), here are {count_gpus()}")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code from or for other tests, and no code that Dynamo skips."""
    import torch  # many tests do without

    torch.compiler.reset()
    yield
    torch.compiler.reset()
