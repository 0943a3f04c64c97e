"""The routes, around a client's loop: the sentinel, or capture and check (docs/sentinel.md, docs/own-model.md).

On the third one, `tpcompile run`, a client is as if it did not know tpcompile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

import tpcompile

ROUTE, RUN_DIR = "TPCOMPILE_CLIENT_ROUTE", "TPCOMPILE_CLIENT_RUN_DIR"
SENTINEL, CHECK, UNEDITED = "sentinel", "check", "run"
# Inductor's C++ costs two cores minutes for each client, and what clients do wrong is in none of it.
BACKEND = os.environ.get("TPCOMPILE_CLIENT_BACKEND", "aot_eager")


@contextmanager
def watched(
    mesh: DeviceMesh | None = None, *, axis: str = "tp", allowed: Sequence[tuple[str, str, str]] = ()
) -> Iterator[None]:
    """Watch what runs inside by the route that the environment names; the verdict is written to the run directory.

    `allowed`: differences that the framework makes itself, (layer, text, reason). Frameworks break graphs by
    themselves, so that any number of breaks is taken that all ranks have.
    """
    run_dir = Path(os.environ[RUN_DIR])
    if os.environ[ROUTE] == UNEDITED:
        yield
        return
    if os.environ[ROUTE] == SENTINEL:
        with tpcompile.Sentinel(mesh=mesh, axis=axis, allow=allowed, run_dir=run_dir):
            yield
        return
    with tpcompile.capture(mesh, axis=axis, allow=allowed, num_breaks=None, run_dir=run_dir) as run:
        yield
    verdict = tpcompile.check(run)
    verdict.publish(run_dir)
    verdict.raise_for_status()
