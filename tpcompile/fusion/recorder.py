"""Compiles of this process -> `Manifest`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from loguru import logger

from tpcompile.errors import TpCompileError
from tpcompile.evidence.compiles.events import FUSION, TraceEvent, event
from tpcompile.evidence.records.reader import read_object
from tpcompile.fastpath.registry import registered
from tpcompile.fusion import resources
from tpcompile.fusion.launched import launched
from tpcompile.fusion.manifest import graph_manifest
from tpcompile.fusion.manifest_records import SCHEMA_VERSION, Decisions, GraphManifest, Manifest
from tpcompile.torch_api import compiler, scheduling

_FOLDER = f"tpcompile_fusion_{SCHEMA_VERSION}"
"""Folder in Inductor's cache with the decisions behind the code that is cached."""


class FusionRecorder:
    """Records what Inductor's scheduler decides in this process while it is active.

        with FusionRecorder() as recorder:
            torch.compile(model)(x)
        manifest = recorder.manifest()

    No function of Inductor is replaced, and no key of its caches changes. Manifests are also written into torch's
    structured trace, if TORCH_TRACE is set, and decisions beside Inductor's cache: a cache hit has those that were
    recorded when its code was made. One at a time in a process; compiles of all threads are recorded.
    """

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._settings: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FusionRecorder:
        self._settings = compiler.compile_config()
        self._stack.enter_context(compiler.tracing(compiler.TraceHandler(self._receive)))
        self._stack.enter_context(logged_manifests())
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def manifest(self) -> Manifest:
        """The manifest of all graphs so far, in the order of their code."""
        return manifest_of(self._events, self._settings)

    def _receive(self, metadata: Mapping[str, Any], payload: str | None) -> None:
        found = event(metadata, payload, wanted=frozenset({FUSION}))
        if found is not None:
            self._events.append(found)


def logged_manifests() -> AbstractContextManager[None]:
    """Log the manifest of every graph that Inductor generates code for in torch's structured trace, as `FUSION`."""
    return scheduling.decisions(_log)


def manifest_of(events: Iterable[TraceEvent], settings: Mapping[str, str]) -> Manifest:
    """Events of this process, in order -> the manifest of its graphs, whose compiles had these settings."""
    found = [(json.loads(logged.payload)["manifest"], logged.compile_id or "") for logged in events]
    graphs = tuple(GraphManifest.model_validate({**fields, "compile_id": of}) for fields, of in found)
    devices = devices_of(graphs)
    is_for_gpu = "cuda" in devices if devices else torch.cuda.is_available()
    manifest = Manifest(
        torch=torch.__version__,
        triton=compiler.triton_version(),
        device=device_name("cuda" if is_for_gpu else "cpu"),
        settings=dict(settings),
        sources=sources_of(graphs),
        graphs=graphs,
    )
    return resources.with_launched(manifest)


def devices_of(graphs: Iterable[GraphManifest]) -> set[str]:
    """`cpu`, `cuda`: devices of the launches of which the scheduler's decisions are known."""
    decisions = [graph.decisions for graph in graphs if graph.decisions]
    return {node.device for each in decisions for node in each.after if node.device}


def sources_of(graphs: Iterable[GraphManifest]) -> dict[str, str]:
    """Fast paths of which the graphs launch an op or a kernel -> hashes of their sources."""
    names = {_as_named(launch.name) for graph in graphs for launch in graph.launches}
    paths = registered()
    found = {}
    for name in sorted(paths):
        source = paths[name].source
        kernels = {kernel.rpartition(".")[2] for kernel in source.kernels}
        if not names.isdisjoint(source.ops | kernels):
            found[name] = source.sha256
    return found


def _as_named(launched: str) -> str:
    """`torch.ops.mine.norm.default` as `mine::norm`, and `scale_kernel_0` of generated code as `scale_kernel`."""
    if not launched.startswith("torch.ops."):
        return launched.rstrip("0123456789").removesuffix("_")
    namespace, op = launched.removeprefix("torch.ops.").split(".")[:2]
    return f"{namespace}::{op}"


def _log(code: str, decisions: dict[str, Any] | None) -> None:
    """Log a graph in the trace, and read or write its decisions in the cache; runs on the compiling thread."""
    sha256 = hashlib.sha256(code.strip().encode()).hexdigest()
    path = scheduling.cache_folder() / _FOLDER / f"{sha256}.json"
    is_cached = decisions is None
    if decisions is None:
        with suppress(OSError, TpCompileError):
            decisions = read_object(path)
    else:
        # Beside the cached code; a cache that cannot be written is no error of the recording.
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{id(decisions)}.partial")
            partial.write_text(json.dumps(decisions))
            partial.replace(path)
    try:
        known = None if decisions is None else Decisions.model_validate(decisions)
        found = graph_manifest(code, known, compile_id="", is_cached=is_cached)
        items = launched(found, compiler.compile_config())
    except Exception:  # the compile of the user's program goes on
        logger.exception("the kernels of a graph cannot be read; please report this")
        return
    fields = {"manifest": found.model_dump(mode="json"), "launched": items.model_dump(mode="json")}
    scheduling.log_event(FUSION, json.dumps(fields))


def device_name(kind: str) -> str:
    """The architecture of this process' `cpu` or `cuda` device: `cpu`, `sm_90`."""
    if kind != "cuda":
        return kind
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
