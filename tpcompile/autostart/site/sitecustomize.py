"""Imported by every Python of a job that `tpcompile run` starts, before its program: waits for torch's process groups.

A process that makes none costs one look at each import. Another `sitecustomize` on the path runs after this one.
"""

import importlib.machinery
import importlib.util
import os
import sys

_GROUPS = "torch.distributed.distributed_c10d"
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
    """Finds the module of the process groups as others do, and has it looked at once it is imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != _GROUPS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                _watch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch(groups) -> None:  # type: ignore[no-untyped-def]
    try:
        from tpcompile.autostart.groups import watch
    except ImportError as error:
        sys.stderr.write(f"tpcompile run: this job is not watched: {sys.executable} cannot import it: {error}\n")
        return
    watch(groups)


if os.environ.get("TPCOMPILE_WATCH"):
    sys.meta_path.insert(0, _AfterImport())
_run_the_next()
