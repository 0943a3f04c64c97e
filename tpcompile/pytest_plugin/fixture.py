"""The fixture `tp`: this rank of the test, and `check`, which compiles a model and compares what the ranks compiled."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tpcompile
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import DivergenceError
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import CheckId, RankRecord, Verdict
from tpcompile.evidence.records.bounds import Number
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.pytest_plugin.files import Place
from tpcompile.pytest_plugin.verdict import replay, verdict_text
from tpcompile.ranks.store import RankStore


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one `check` must find on every rank."""

    graphs: int | None = 1
    """Graphs of the first compiles; None for any number."""
    breaks: int = 0
    """Graph breaks."""
    recompiles: int | None = 0
    """Further compiles of a function that is already compiled; None for any number."""


class TensorParallel:
    """This rank of a test on ranks; what `tp` is."""

    def __init__(self, place: Place) -> None:
        self.rank: int = place.rank
        self.world_size: int = place.job.world_size
        self.device = torch.device("cpu")
        # Plain attributes: compiled code may read them, and a lock of `cached_property` would break the graph.
        self.mesh: DeviceMesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("tp",))
        """All ranks of the test in one axis, `tp`."""
        self.comm = Collectives(self.mesh["tp"])
        """Collectives with a stated gradient over that axis."""
        self.verdict: Verdict | None = None
        """Verdict of the last `check`."""
        self._files = place.job.files
        self._timeout_s = place.job.timeout_s
        self._expected = Expected()
        self._numbers = itertools.count()

    def expect(self, *, graphs: int | None = 1, breaks: int = 0, recompiles: int | None = 0) -> None:
        """Set what later calls of `check` must find on every rank; without a call, the defaults.

        graphs: graphs, without those of recompiles; None for any number.
        breaks: graph breaks.
        recompiles: compiles of a function that is already compiled; None for any number.
        """
        self._expected = Expected(graphs=graphs, breaks=breaks, recompiles=recompiles)

    def check(
        self,
        model: Callable[..., Any],
        *calls: Any,
        mesh: DeviceMesh | None = None,
        backward: bool = False,
        allow: Sequence[tuple[str, str, str]] = (),
        tp_aware: Sequence[str] = (),
        **compile_options: Any,
    ) -> Any:
        """Compile `model`, call it, and compare what the ranks compiled; every rank of the test calls it.

        calls: arguments of the calls, in order: a tensor, a tuple of arguments, or a dict of keyword arguments. Each
            call is made twice; the second time nothing may compile that `expect` does not announce.
        mesh: the mesh whose axis `tp` has the ranks to compare, by default all ranks.
        backward: also run the backward of the sum of the output.
        allow, tp_aware: as in `tpcompile.capture`.
        compile_options: of `torch.compile`, `backend="aot_eager"` for example; none for a model that is compiled.

        Returns the output of the last call. Raises DivergenceError with the verdict: cause, rank, op or guard, and the
        user's line. A collective that a rank leaves out ends the ranks with the same text.
        """
        __tracebackhide__ = True
        name = f"check_{next(self._numbers)}"
        program = _compiled(model, compile_options)
        mesh = mesh or self.mesh
        with tpcompile.capture(mesh, allow=allow, tp_aware=tp_aware, run_dir=self._files.stopped_by_sentinel) as run:
            for number, arguments in enumerate(calls, start=1):
                for phase in (f"call {number}", f"call {number} again"):
                    with run.phase(phase):
                        output = _call(program, arguments, backward=backward)
        verdict = self.verdict = tpcompile.check(run, timeout_s=self._timeout_s)
        observed = self._observed(name, verdict._evidence.record)
        wrong = _wrong(observed, self._expected)
        is_red = _is_red(verdict, self._expected)
        if wrong or is_red:
            folder = verdict._write_evidence(self._files.folder / name).path
            found = verdict_text(verdict, folder) if is_red else f"{verdict.summary}; {replay(folder)}"
            lines = [*wrong.values(), *_evidence(verdict, verdict._evidence.record, wrong), found]
            error = DivergenceError("\n".join(lines))
            error.run_dir = folder
            raise error
        return output

    def _observed(self, name: str, record: RankRecord) -> dict[int, Counter[str]]:
        """Counts of every rank, so that all ranks judge the same."""
        store = RankStore.of_job(f"tpcompile/pytest/{name}", None)
        recompiles = sum(counters.recompiles for counters in record.counters)
        graphs = sum(counters.graphs for counters in record.counters)
        breaks = sum(counters.breaks for counters in record.counters)
        own_counts = {"graphs": graphs - recompiles, "breaks": breaks, "recompiles": recompiles}
        store.put(f"counts/{self.rank}", own_counts)
        keys = {rank: f"counts/{rank}" for rank in range(self.world_size)}
        found, _ = store.gather(keys, dict[str, Number], timeout_s=self._timeout_s)
        return {rank: Counter(counts) for rank, counts in sorted(found.items())}


def _compiled(model: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """The model, compiled again: compiles of earlier checks are not evidence for this one."""
    torch.compiler.reset()
    if hasattr(model, "_torchdynamo_orig_callable"):
        names = ", ".join(options)
        if options:
            raise TypeError(f"the model is compiled already: {names} would have no effect")
        return model
    return torch.compile(model, **options)


def _call(program: Callable[..., Any], arguments: Any, *, backward: bool) -> Any:
    if isinstance(arguments, Mapping):
        output = program(**arguments)
    elif isinstance(arguments, tuple | list):
        output = program(*arguments)
    else:
        output = program(arguments)
    if backward:
        loss = output.sum()
        loss.backward()
    return output


def _wrong(observed: Mapping[int, Counter[str]], expected: Expected) -> dict[str, str]:
    """Count -> `graphs: expected 1, found 2 on rank 1`, for every count that is not as expected."""
    found = {}
    for name, wanted in vars(expected).items():
        if wanted is None:
            continue
        numbers = {rank: counts[name] for rank, counts in observed.items()}
        sides = grouped(numbers, numbers.__getitem__)
        others = [f"{count} on {named_ranks(ranks)}" for count, ranks in sides.items() if count != wanted]
        if others:
            found[name] = f"{name}: expected {wanted}, found {', '.join(others)}"
    return found


def _evidence(verdict: Verdict, record: RankRecord, wrong: Container[str]) -> Iterator[str]:
    """The graphs, breaks and recompiles behind the counts that are not as expected, each with the user's line."""
    if "graphs" in wrong:
        for compile_ in record.compiles:
            is_first = compile_.compile_id.endswith("/0")
            if is_first and compile_.graphs:
                yield f"  graph of {compile_.line or compile_.function}"
    if "breaks" in wrong:
        for compile_ in record.compiles:
            for found in compile_.breaks:
                yield f"  break at {found.line}: {found.reason}"
    if "recompiles" in wrong:
        for cause in verdict.recompiles:
            at = f" at {cause.line}" if cause.line else ""
            yield f"  recompiled: {cause.guard}{at} ({named_ranks(cause.ranks)})"


def _is_red(verdict: Verdict, expected: Expected) -> bool:
    """True when a check fails, other than for graph breaks that are expected."""
    red = [check for check in verdict.checks if check.is_red]
    if expected.breaks:
        red = [check for check in red if check.cause != Cause.GRAPH_BREAK and check.id != CheckId.ONE_REGION]
    return bool(red) or any(divergence.is_red for divergence in verdict.divergences)
