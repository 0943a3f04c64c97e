"""Imported by every Python of a job that `tpcompile run` starts, before its program: waits for torch's process groups.

What a rank executes is recorded from the import of torch on. A process that imports neither costs two looks at each
import. Another `sitecustomize` on the path runs after this one.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys

_TORCH, _GROUPS = "torch", "torch.distributed.distributed_c10d"
_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next() -> None:
    """Import the `sitecustomize` that this one hides."""
    path = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _AfterImport:
    """Finds a module as others do, and has it looked at once it is imported."""

    def __init__(self, wanted, act):  # type: ignore[no-untyped-def]
        self._wanted, self._act = wanted, act

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != self._wanted:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                self._act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch(groups) -> None:  # type: ignore[no-untyped-def]
    try:
        from tpcompile.autostart.groups import watch
    except ImportError as error:
        sys.stderr.write(f"tpcompile run: this job is not watched: {sys.executable} cannot import it: {error}\n")
        return
    watch(groups)


def _record(torch) -> None:  # type: ignore[no-untyped-def]
    with contextlib.suppress(ImportError):  # `_watch` says so
        from tpcompile.recording import early

        early.begin()


if os.environ.get("TPCOMPILE_WATCH"):
    sys.meta_path.insert(0, _AfterImport(_GROUPS, _watch))  # type: ignore[no-untyped-call]
    if "RANK" in os.environ:  # the launcher and other processes of the job do without what recording imports
        sys.meta_path.insert(0, _AfterImport(_TORCH, _record))  # type: ignore[no-untyped-call]
_run_the_next()
