"""What Inductor's scheduler decides for a graph, seen without replacing any of its functions: torch 2.11.0 and 2.13.0.

    name                                  why
    V.set_choices_handler                 scores of pairs, and what the choices allow; per thread
    artifact logger "fusion"              refusals with their reason, fusions, benchmarks
    GraphLowering.save_output_code        the moment at which nodes and generated code are final
    trace_structured                      events of our own in the trace
    cache_dir_utils.cache_dir             where decisions are kept for cache hits

`tests/torch_api/test_scheduling.py` fails when one of them moves.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from loguru import logger
from torch._inductor import scheduler as _scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.virtualized import NullHandler as _NullHandler
from torch._inductor.virtualized import V
from torch._logging import trace_structured

from tpcompile.torch_api import inlined, scheduled
from tpcompile.torch_api.compiler import TraceHandler, tracing

Receive = Callable[[str, dict[str, Any] | None], None]
_BEFORE_SCHEDULING = "inductor_post_grad_graph"
"""Artifact that torch logs on the compiling thread before it schedules a graph; a cache hit logs none."""


class _Graph:
    """The decisions for one graph."""

    def __init__(self) -> None:
        self.before: list[dict[str, Any]] | None = None
        self.scored: dict[tuple[str, str], dict[str, int]] = {}
        self.allowed: dict[tuple[str, str], bool] = {}
        self.refused: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.fused: list[tuple[str, str]] = []
        self.num_rounds = 0

    def finished(self) -> dict[str, Any]:
        """All of it as JSON, with the nodes that were generated; called while the graph is live."""
        nodes = scheduled.generated_nodes()
        if self.before is None:  # no pair was looked at
            self.before = scheduled.parts_of(nodes)
        pairs = self.scored.keys() | self.allowed.keys() | self.refused.keys()
        # Names of torch that have moved: something was fused, and no fusion was logged or no score was asked for.
        was_fused = any(scheduled.is_fused(one) for one in nodes)
        seen = {'fusions in the log "fusion"': self.fused, "scores of pairs": self.scored}
        unseen = [name for name, found in seen.items() if was_fused and not found]
        return {
            "before": self.before,
            "after": [scheduled.node(one) for one in nodes],
            "pairs": [self._pair(pair) for pair in sorted(pairs)],
            "fused": self.fused,
            "num_rounds": self.num_rounds,
            "ops": scheduled.one_kernel_per_op(),
            "outputs": sorted(V.graph.get_output_names()),
            "sizes": scheduled.sizes(nodes),
            "recomputed": inlined.recomputed(nodes),
            "realized": inlined.realized(nodes),
            "unseen": unseen,
        }

    def _pair(self, pair: tuple[str, str]) -> dict[str, Any]:
        return {
            "first": pair[0],
            "second": pair[1],
            "score": self.scored.get(pair),
            "is_allowed": self.allowed.get(pair),
            "refused": list(dict.fromkeys(self.refused.get(pair, ()))),
        }


class _Current(threading.local):
    """The graph that this thread compiles."""

    graph: _Graph | None = None

    def note(self, what: Callable[[_Graph], None]) -> None:
        """Note something of the graph; what cannot be read ends the recording of it, not the user's compile."""
        if self.graph is None:
            return
        try:
            what(self.graph)
        except Exception:
            logger.exception("Inductor's decisions cannot be read; please report this")
            self.graph = None


@contextmanager
def decisions(receive: Receive) -> Iterator[None]:
    """Call `receive(code, decisions)` for each graph that Inductor generates code for; None for a cache hit.

    On the compiling thread. One at a time in a process.
    """
    current = _Current()

    def logged(metadata: dict[str, Any], _payload: str | None) -> None:
        artifact = metadata.get("artifact")
        if artifact is not None and artifact.get("name") == _BEFORE_SCHEDULING:
            current.graph = _Graph()
            _install_choices(current)

    def generated(code: str) -> None:
        found: list[dict[str, Any]] = []
        if not isinstance(V.graph, _NullHandler):
            current.note(lambda graph: found.append(graph.finished()))
        current.graph = None
        receive(code, found[0] if found else None)
        if before is not None:
            before(code)

    before = GraphLowering.save_output_code
    with ExitStack() as stack:
        stack.enter_context(tracing(TraceHandler(logged)))
        stack.enter_context(_fusion_log(_LogHandler(current)))
        GraphLowering.save_output_code = staticmethod(generated)  # type: ignore[assignment]
        try:
            yield
        finally:
            GraphLowering.save_output_code = before


class _LogHandler(logging.Handler):
    """Reads the records of the fusion log; that of a refusal carries it as an object."""

    def __init__(self, current: _Current) -> None:
        super().__init__(logging.DEBUG)
        self._current = current

    def emit(self, record: logging.LogRecord) -> None:
        self._current.note(lambda graph: self._note(graph, record))

    def _note(self, graph: _Graph, record: logging.LogRecord) -> None:
        message = record.msg
        if isinstance(message, _scheduler.WhyNoFuse):
            graph.refused[message.name1, message.name2].append(message.reason % message.args)
            return
        text = str(message)
        if text.startswith("fusing %s with %s"):
            first, second = record.args  # type: ignore[misc]
            graph.fused.append((str(first), str(second)))
        elif text.startswith("===== attempting fusion"):
            graph.num_rounds += 1


@contextmanager
def _fusion_log(handler: logging.Handler) -> Iterator[None]:
    """Let the log make its records, for this handler; what is printed of it stays as it was."""
    log = _scheduler.fusion_log
    level, propagate = log.level, log.propagate
    if not log.isEnabledFor(logging.DEBUG):
        log.propagate = False
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def _install_choices(current: _Current) -> None:
    """Let this thread's choices note what they are asked, once; they choose as before."""
    chosen: Any = V.choices
    if getattr(chosen, "notes_of", None) is current:
        return

    class NotingChoices(type(getattr(chosen, "notes_for", chosen))):  # type: ignore[misc]
        """The choices of this thread."""

        notes_of = current
        notes_for = getattr(chosen, "notes_for", chosen)

        def score_fusion(self, scheduler: Any, node1: Any, node2: Any) -> Any:
            score = super().score_fusion(scheduler, node1, node2)
            current.note(lambda graph: _note_score(graph, node1, node2, score))
            return score

    def noted(name: str) -> Callable[..., bool]:
        def choose(self: Any, scheduler: Any, node1: Any, node2: Any, shared: int) -> bool:
            allowed: bool = getattr(super(NotingChoices, self), name)(scheduler, node1, node2, shared)
            current.note(lambda graph: _note_choice(graph, scheduler, node1, node2, allowed))
            return allowed

        return choose

    for name in ("can_fuse", "can_fuse_vertical", "can_fuse_horizontal"):
        setattr(NotingChoices, name, noted(name))
    noting = NotingChoices()
    for name, value in vars(chosen).items():  # settings of choices of the user's own
        setattr(noting, name, value)
    V.set_choices_handler(noting)


def _note_score(graph: _Graph, node1: Any, node2: Any, score: Any) -> None:
    numbers = {name: int(value) for name, value in dataclasses.asdict(score).items()}
    graph.scored[node1.get_name(), node2.get_name()] = numbers


def _note_choice(graph: _Graph, scheduler: Any, node1: Any, node2: Any, allowed: bool) -> None:
    if graph.before is None:
        graph.before = [scheduled.node(one) for one in scheduled.ungrouped(scheduler.nodes)]
    graph.allowed[node1.get_name(), node2.get_name()] = allowed


def log_event(name: str, payload: str) -> None:
    """Write an artifact of our own into torch's structured trace, with the id of the compile that runs."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=lambda: payload)


def cache_folder() -> Path:
    """Inductor's cache of generated code."""
    return Path(cache_dir())
