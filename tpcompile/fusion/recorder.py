"""Compiles of this process -> `Manifest`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from tpcompile.evidence.compiles.events import TraceEvent, event
from tpcompile.fusion import resources
from tpcompile.fusion.manifest import graph_manifest
from tpcompile.fusion.records import Decisions, GraphManifest, Manifest
from tpcompile.torch_api import compiler, scheduling

FUSION_EVENT = "tpcompile_fusion"
"""Artifact in torch's structured trace: the decisions for the generated code with this hash."""
CODE_EVENT = "inductor_output_code"
_WANTED = frozenset({FUSION_EVENT, CODE_EVENT})
_FOLDER = "tpcompile_fusion"
"""In Inductor's cache: the decisions behind the code that is cached."""


class FusionRecorder:
    """Records what Inductor's scheduler decides in this process while it is active.

        with FusionRecorder() as recorder:
            torch.compile(model)(x)
        manifest = recorder.manifest()

    No function of Inductor is replaced, and no key of its caches changes. The decisions are also written into torch's
    structured trace, if TORCH_TRACE is set, and beside Inductor's cache: a cache hit has the decisions that were
    recorded when its code was made. One at a time in a process; compiles of all threads are recorded.
    """

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._settings: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FusionRecorder:
        self._settings = compiler.compile_config()
        self._stack.enter_context(compiler.tracing(compiler.TraceHandler(self._receive)))
        self._stack.enter_context(scheduling.decisions(_log))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def manifest(self) -> Manifest:
        """Of all graphs so far, in the order of their code."""
        found = Manifest(
            torch=torch.__version__,
            triton=compiler.triton_version(),
            device=_device(),
            settings=self._settings,
            graphs=graph_manifests(self._events),
        )
        return resources.with_launched(found)

    def _receive(self, metadata: Mapping[str, Any], payload: str | None) -> None:
        found = event(metadata, payload, wanted=_WANTED)
        if found is not None:
            self._events.append(found)


def graph_manifests(events: Iterable[TraceEvent]) -> tuple[GraphManifest, ...]:
    """Events of a live process or of a TORCH_TRACE file -> the manifest of each graph, in the order of their code."""
    every = list(events)
    codes = [one for one in every if one.name == CODE_EVENT]
    known = _decisions(every)
    found = []
    for one in codes:
        decisions, is_cached = known.get(_hash(one.payload), (None, True))
        found.append(graph_manifest(one.payload, decisions, compile_id=one.compile_id or "", is_cached=is_cached))
    return tuple(found)


def _decisions(events: Iterable[TraceEvent]) -> dict[str, tuple[Decisions, bool]]:
    """Hash of the code -> the decisions behind it, and whether they come from a cache."""
    found = {}
    for one in events:
        if one.name == FUSION_EVENT:
            fields = json.loads(one.payload)
            decisions = Decisions.model_validate(fields["decisions"])
            found[fields["code"]] = decisions, fields["is_cached"]
    return found


def _log(code: str, decisions: dict[str, Any] | None) -> None:
    """On the compiling thread: into the trace, and from or into the cache."""
    path = scheduling.cache_folder() / _FOLDER / f"{_hash(code)}.json"
    is_cached = decisions is None
    if decisions is None:
        with suppress(OSError, ValueError):
            decisions = json.loads(path.read_text())
    else:
        _keep(path, decisions)
    if decisions is not None:
        fields = {"code": _hash(code), "is_cached": is_cached, "decisions": decisions}
        scheduling.log_event(FUSION_EVENT, json.dumps(fields))


def _keep(path: Path, decisions: dict[str, Any]) -> None:
    """Beside the cached code; a cache that cannot be written is no error of the recording."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{id(decisions)}.partial")
        partial.write_text(json.dumps(decisions))
        partial.replace(path)


def _hash(code: str) -> str:
    return hashlib.sha256(code.strip().encode()).hexdigest()


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
