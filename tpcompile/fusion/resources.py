"""A manifest and the kernels that this process has loaded -> the same manifest with what they need of the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tpcompile.fusion.manifest_records import Manifest, Resources
from tpcompile.fusion.wrapper import launches, triton_sources
from tpcompile.torch_api import compiler, resources

CODE_EVENT = "inductor_output_code"

_Known = Mapping[tuple[str, str], tuple[Resources, ...]]
"""Name of a kernel and hash of its source -> what its configurations need."""


def with_launched(found: Manifest) -> Manifest:
    """Add to each kernel that has run on a GPU the configuration that it runs with, as autotuning chose it."""
    known: dict[tuple[str, str], tuple[Resources, ...]] = {}
    for code, kernels in resources.generated_modules():
        needs = {name: resources.of_launched(kernel) for name, kernel in kernels.items()}
        known |= _by_source(code, needs)
    return _added(found, known)


def with_compiled(found: Manifest, codes: Iterable[str]) -> Manifest:
    """Compile the kernels of these codes for the GPU that is not there: all configurations that may be chosen."""
    known: dict[tuple[str, str], tuple[Resources, ...]] = {}
    for code in codes:
        needs = {name: resources.of_source(source, name) for name, source in triton_sources(code).items()}
        known |= _by_source(code, needs)
    return _added(found, known)


@contextmanager
def generated_codes() -> Iterator[list[str]]:
    """The codes that Inductor generates inside, in order, for `with_compiled`."""
    codes: list[str] = []

    def receive(metadata: Mapping[str, Any], payload: str | None) -> None:
        if CODE_EVENT in metadata and payload is not None:
            codes.append(payload)

    with compiler.tracing(compiler.TraceHandler(receive)):
        yield codes


def _by_source(code: str, needs: Mapping[str, resources.Configurations]) -> _Known:
    launched = [call for call in launches(code) if call.source and call.name in needs]
    return {(call.name, call.source): tuple(Resources(**one) for one in needs[call.name]) for call in launched}


def _added(found: Manifest, known: _Known) -> Manifest:
    graphs = []
    for graph in found.graphs:
        launched = []
        for launch in graph.launches:
            needs = known.get((launch.name, launch.source), ())
            launched.append(launch.model_copy(update={"resources": needs}))
        graphs.append(graph.model_copy(update={"launches": tuple(launched)}))
    return found.model_copy(update={"graphs": tuple(graphs)})
