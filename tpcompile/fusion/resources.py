"""A manifest and the kernels that this process has loaded -> the same manifest with what they need of the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tpcompile.fusion.manifest_records import Manifest, Resources
from tpcompile.fusion.wrapper import launches, triton_sources
from tpcompile.torch_api import compiler, resources

CODE_EVENT = "inductor_output_code"


def with_launched(found: Manifest) -> Manifest:
    """Add to each kernel that has run on a GPU the configuration that it runs with, as autotuning chose it."""
    needs = {}
    for code, kernels in resources.generated_modules():
        needs[code] = {name: resources.of_launched(kernel) for name, kernel in kernels.items()}
    return _added(found, needs)


def with_compiled(found: Manifest, codes: Iterable[str]) -> Manifest:
    """Compile the kernels of these codes for the GPU that is not there: all configurations that may be chosen."""
    needs = {}
    for code in codes:
        needs[code] = {name: resources.of_source(source, name) for name, source in triton_sources(code).items()}
    return _added(found, needs)


@contextmanager
def generated_codes() -> Iterator[list[str]]:
    """The codes that Inductor generates inside, in order, for `with_compiled`."""
    codes: list[str] = []

    def receive(metadata: Mapping[str, Any], payload: str | None) -> None:
        if CODE_EVENT in metadata and payload is not None:
            codes.append(payload)

    with compiler.tracing(compiler.TraceHandler(receive)):
        yield codes


def _added(found: Manifest, needs: Mapping[str, Mapping[str, resources.Configurations]]) -> Manifest:
    """`needs` are those of each kernel by name, by the code that has it."""
    known: dict[tuple[str, str], tuple[Resources, ...]] = {}
    for code, by_name in needs.items():
        for call in launches(code):
            if call.source and call.name in by_name:
                known[call.name, call.source] = tuple(Resources(**one) for one in by_name[call.name])
    graphs = []
    for graph in found.graphs:
        launched = []
        for launch in graph.launches:
            own = known.get((launch.name, launch.source), ())
            launched.append(launch.model_copy(update={"resources": own}))
        graphs.append(graph.model_copy(update={"launches": tuple(launched)}))
    return found.model_copy(update={"graphs": tuple(graphs)})
