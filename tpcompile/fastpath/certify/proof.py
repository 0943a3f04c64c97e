"""Fast path with cases -> certificate: its worst error over ranks and dtypes, and which mutations its cases miss."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from types import FunctionType
from typing import Any

import torch
from loguru import logger

from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.fastpath.certificate import (
    MAX_RATIO,
    TP_SIZES,
    Certificate,
    Kind,
    Power,
    Survivor,
    Worst,
    binaries_of,
    device_kind,
    power_of,
)
from tpcompile.fastpath.certify.mutate import ArgumentMutation, Mutation, argument_mutations, source_mutations
from tpcompile.fastpath.certify.shard_errors import Prepared, Setting, check_refusals, prepared, ratios
from tpcompile.fastpath.certify.trials import Call, Trial, trial_of
from tpcompile.fastpath.registry import FastPath, TpSupport, dtype_name, registered
from tpcompile.ranks.children import in_children

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CPU_S = 1800.0
"""CPU time for all cases."""
_PROGRESS_S = 30.0
_LONGER = 3
"""A mutation is endless when it takes half a minute more CPU time than this multiple of the right kernel's."""


@dataclass(frozen=True)
class Result:
    """One case in one setting."""

    case: str
    ratios: dict[str, float]

    @property
    def worst(self) -> Worst:
        """The tensor with the largest error; NaN is larger than any."""
        tensor = max(self.ratios, key=lambda name: _order(self.ratios[name]))
        return Worst(ratio=self.ratios[tensor], case=self.case, tensor=tensor)


def certify(
    name: str,
    *,
    tp_sizes: Sequence[int] = TP_SIZES,
    jobs: int = 1,
    num_mutations: int | None = None,
    is_for_more_cases: bool = False,
    command: str = "",
) -> Certificate:
    """Run all cases of a registered fast path, then its mutations through the same cases.

    On a GPU the mutations are not run: what the cases see is taken from a certificate of the same source that was made
    without one. `num_mutations` takes that many, evenly spread; None all. `is_for_more_cases` takes those that no case
    caught in that certificate, when cases were added and none was changed. Raises ConfigError for a path that is not
    registered, has no cases, no such certificate, or a source that does not say what runs, and for more than one rank
    when it is not TP-aware; DivergenceError when a case fails, with the case, the tensor and the numbers.
    """
    path = _provable(name, tp_sizes)
    trial = trial_of(name)
    settings = _settings(path, tp_sizes)
    on_gpu = torch.cuda.is_available()
    known_power = _known_power(path) if on_gpu or is_for_more_cases else None
    _prepare(path)
    known = prepared(path, ((case, setting) for setting in settings for case in trial.cases(setting.tp)))
    if not known:
        raise ConfigError(f"fast path {name} has no cases for tp {', '.join(map(str, tp_sizes))}")
    results, used_s = _measured(path, trial, known)
    worst = _worst(path, results)
    power = known_power
    if power is None or not on_gpu:
        first_case = next(iter(trial.cases(min(2, max(setting.tp for setting in settings)))))
        of_options = not path.source.kernels  # a library call has little source, and computes what its options say
        interpreted = path.source.functions - _only_on_gpus(path)
        everything: list[Mutation] = list(source_mutations(interpreted, of_options=of_options))
        everything += argument_mutations(first_case)
        mutations = _missed(everything, known_power) if known_power else _spread(everything, num_mutations)
        survivors = _survivors(path, trial, known, mutations, jobs=jobs, cpu_s=30 + _LONGER * used_s)
        number = len(everything) if known_power else len(mutations)
        power = Power(device=device_kind(), num_mutations=number, survivors=survivors)
    return Certificate(
        name=name,
        tp=path.tp,
        source=path.source.sha256,
        libraries=dict(path.source.libraries),
        device=device_kind(),
        machine=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        torch=torch.__version__,
        triton=version("triton"),
        command=command,
        tp_sizes=tuple(sorted({setting.tp for setting in settings})),
        dtypes=tuple(dict.fromkeys(dtype_name(setting.dtype) for setting in settings)),
        num_cases=len(results),
        worst=worst,
        power=power,
        launches_kernels=bool(path.source.kernels),
        binaries=binaries_of(path),
    )


def _provable(name: str, tp_sizes: Sequence[int]) -> FastPath:
    """The registered fast path. Raises ConfigError when there is none, or when it cannot be certified for these."""
    path = find(name)
    if path.tp == TpSupport.NONE and set(tp_sizes) != {1}:
        raise ConfigError(f"fast path {name} is declared tp=none, so it is refused on shards: certify it with --tp 1")
    if path.source.refused:
        raise ConfigError(f"fast path {name} cannot be certified: {path.source.refused}")
    return path


def _worst(path: FastPath, results: Sequence[Result]) -> Worst:
    """The largest error. Raises DivergenceError when it is above the limit."""
    worst = max((result.worst for result in results), key=lambda found: _order(found.ratio))
    if not worst.ratio <= MAX_RATIO:  # True for NaN
        raise DivergenceError(
            f"fast path {path.name}: {worst.tensor} has {worst.ratio:.3g} times the error of the plain code on one "
            f"device in {worst.case} (limit {MAX_RATIO:g})"
        )
    return worst


def find(name: str) -> FastPath:
    """The registered fast path; ConfigError when there is none."""
    path = registered().get(name)
    if path is None:
        known = ", ".join(sorted(registered())) or "none"
        raise ConfigError(f"no fast path is called {name} (registered: {known}); import the module that declares it")
    return path


def _known_power(path: FastPath) -> Power:
    known = power_of(path)
    if known is None:
        raise ConfigError(
            f"fast path {path.name} has no certificate for source {path.source.sha256} made without a GPU, which says "
            "what its cases see; make it first, with TRITON_INTERPRET=1 and CUDA_VISIBLE_DEVICES empty"
        )
    return known


def _measured(path: FastPath, trial: Trial, known: Sequence[Prepared]) -> tuple[list[Result], float]:
    """The results of all cases, and their CPU time. Without a GPU in a forked process; CUDA cannot be used in one."""

    def run() -> tuple[list[Result], float]:
        check_refusals(path, trial, known[0].setting.device)
        results = list(_results(path, trial, known))
        return results, sum(os.times()[:4])  # with that of its own children

    if torch.cuda.is_available():
        return run()
    (measured,) = in_children([run], jobs=1, cpu_s=_CPU_S)
    if measured.failure:
        raise DivergenceError(f"fast path {path.name}: {measured.failure}")
    results, used_s = measured.result
    return results, used_s


def _settings(path: FastPath, tp_sizes: Iterable[int]) -> list[Setting]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = path.dtypes or _DTYPES
    return [Setting(tp, dtype, device) for dtype in dtypes for tp in tp_sizes]


def _results(path: FastPath, trial: Trial, known: Iterable[Prepared]) -> Iterator[Result]:
    for one in known:
        try:
            yield Result(str(one), ratios(path, trial, one))
        except DivergenceError as error:
            raise DivergenceError(f"{error}, in {one}") from error


def _only_on_gpus(path: FastPath) -> frozenset[FunctionType]:
    """Kernels in Gluon, which Triton's interpreter cannot run: the same cases check what they compute on a GPU."""
    from triton.runtime.jit import JITFunction

    kernels = path.source.compiled.values()
    gluon = [kernel for kernel in kernels if isinstance(kernel, JITFunction) and kernel.is_gluon()]
    return frozenset(kernel.fn for kernel in gluon)


def _spread(mutations: list[Mutation], number: int | None) -> list[Mutation]:
    if number is None or number >= len(mutations):
        return mutations
    return [mutations[index * len(mutations) // number] for index in range(number)]


def _missed(mutations: list[Mutation], power: Power) -> list[Mutation]:
    """The mutations that no case caught in that certificate, compared without line numbers, which may have moved."""
    survived = {_in_file(survivor) for survivor in power.survivors}
    found = [mutation for mutation in mutations if _in_file(mutation) in survived]
    if len(mutations) != power.num_mutations or survived != set(map(_in_file, found)):
        raise ConfigError("its certificate is of different mutations, although of the same source; run all of them")
    return found


def _in_file(changed: Mutation | Survivor) -> tuple[str, str]:
    return changed.place.partition(":")[0], changed.change


def _survivors(
    path: FastPath, trial: Trial, known: Sequence[Prepared], mutations: list[Mutation], *, jobs: int, cpu_s: float
) -> tuple[Survivor, ...]:
    """The mutations that no case catches; those with a declared reason run for the first number of ranks alone."""
    fewer = [one for one in known if one.setting.tp == known[0].setting.tp]
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for mutation in mutations:
            kind, _ = trial.reason(mutation.change)
            cases = known if kind == Kind.MISSED else fewer
            runs.append(partial(_survives, path, trial, cases, mutation, folder))
        children = in_children(runs, jobs=jobs, cpu_s=cpu_s, on_end=_progress(path, len(runs)))
    survivors = []
    for mutation, ended in zip(mutations, children, strict=True):
        if ended.result:
            kind, reason = trial.reason(mutation.change)
            survivors.append(Survivor(place=mutation.place, change=mutation.change, kind=kind, reason=reason))
    return tuple(survivors)


def _progress(path: FastPath, total: int) -> Callable[[int], None]:
    """Log how many mutations have ended, every 30 s."""
    started = shown = time.monotonic()

    def log(number: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _PROGRESS_S:
            shown = now
            logger.info("{}: {} of {} mutations have run, {:.0f} s", path.name, number, total, now - started)

    return log


def _survives(path: FastPath, trial: Trial, known: Sequence[Prepared], mutation: Mutation, folder: str) -> bool:
    """True when all cases pass with the mutation in place; a raise, a crash or a hang is a catch."""
    if isinstance(mutation, ArgumentMutation):
        trial = _spoiled(trial, mutation)
    else:
        mutation.apply(folder)
    check_refusals(path, trial, known[0].setting.device)
    results = _results(path, trial, known)
    return all(result.worst.ratio <= MAX_RATIO for result in results)


def _spoiled(trial: Trial, mutation: ArgumentMutation) -> Trial:
    def on_ranks(call: Call, ranks: list[dict[str, Any]]) -> list[tuple[torch.Tensor, ...]]:
        return trial.on_ranks(call, mutation.spoil(ranks))

    return replace(trial, on_ranks=on_ranks)


def _prepare(path: FastPath) -> None:
    """Prepare this process for forks: one thread, all of torch imported, and bfloat16 rounded as on GPUs.

    The backward has to come first: after tracing with a fake GPU autograd would start a thread for that device, and a
    process forked from one with such a thread could run no backward.
    """
    torch.set_num_threads(1)
    torch.ones((), requires_grad=True).backward()
    torch.compiler.reset()  # imports Dynamo, as the first call of a custom op does
    if device_kind() == "interpreter":
        from tpcompile.torch_api import interpreted

        interpreted.like_gpus()
        interpreted.rewrite(path.source.functions)


def _order(ratio: float) -> float:
    return float("inf") if ratio != ratio else ratio
