"""This machine and environment -> all findings, in the order of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tpcompile.doctor import caches, host, known, torch_says, variables
from tpcompile.doctor.finding import Finding


def examine(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Each finding as soon as it is known."""
    yield host.python()
    answer = torch_says.ask()
    if isinstance(answer, Finding):
        yield answer
    else:
        yield from torch_says.findings(answer, environ)
    yield host.compiler(environ)
    yield from caches.caches(environ)
    yield host.shared_memory()
    yield host.addresses()
    yield host.port()
    yield from variables.variables(environ)
    yield from known.known()
