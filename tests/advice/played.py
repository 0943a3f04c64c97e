"""Programs on two simulated ranks of this process, one after the other -> the verdict on what they compiled.

The ranks have a group that communicates nothing, so that a program in which real ranks would hang comes to its end. A
program is recorded from its `init_process_group` on, as under `tpcompile run`.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.advice.pages import Allowed, example
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.rank_taint import SUGGESTIONS
from tpcompile.evidence.judgement.verdict import capture_rules, conclude, fetch_from
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.compile import TaintKind
from tpcompile.recording import CaptureSession

WORLD_SIZE = 2
BACKEND = "aot_eager_decomp_partition"
"""Instead of Inductor, where a program names none: it traces and partitions likewise, and compiles nothing."""
WATCHED = frozenset({
    Cause.STUCK_COLLECTIVE, Cause.INPUT_VALUES, Cause.WEIGHTS, Cause.KILLED, Cause.RAISED, Cause.PARTED,
    Cause.CALL_COUNT, Cause.WRONG_VARIANT, Cause.AGREED_VALUES,
})  # fmt: skip
"""What shows only while ranks run: tests/advice/test_watched_programs.py plays their programs."""
LISTED = frozenset({Cause.COMPILE_ORDER, Cause.RANK_PARAMETRIC})
"""Differences that are no fault: they are listed, and the verdict is green."""
Body = Callable[["Rank"], None]


@dataclass(frozen=True)
class Rank:
    """Where a program runs."""

    rank: int
    follows: bool
    """Whether it does what the sentence says."""


@dataclass(frozen=True)
class Side:
    """A program as one rank plays it, given its rank."""

    play: Callable[[int], Any]
    allowed: Allowed = ()
    is_strict: bool = True
    """Whether a value that depends on the rank is a fault, also where the programs are equal."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that shows what sentences are worth: as it is, and with each of them followed."""

    name: str
    key: Cause | TaintKind
    """Of the table that has the sentences."""
    as_it_is: Side
    followed: dict[str, Side]
    """Sentence -> the program that follows it."""


_BODIES: list[Program] = []


def suggested(kind: TaintKind) -> Callable[[Body], Body]:
    """Declare the program of what is suggested for a kind of taint."""

    def declare(body: Body) -> Body:
        def side(follows: bool) -> Side:
            return Side(lambda rank: (dist.init_process_group("gloo"), body(Rank(rank, follows))))

        name = f"{kind.value}: {body.__name__}"
        _BODIES.append(Program(name=name, key=kind, as_it_is=side(False), followed={SUGGESTIONS[kind]: side(True)}))
        return body

    return declare


def declared() -> list[Program]:
    """All of them: those of the pages of causes, and of values that depend on the rank."""
    importlib.import_module("tests.advice.programs")
    pages = [_of_page(cause) for cause in Cause if cause not in WATCHED]
    return [*filter(None, pages), *_BODIES]


def _of_page(cause: Cause) -> Program | None:
    shown = example(cause)
    if shown is None:
        return None
    as_it_is = Side(_played(shown.program), is_strict=cause not in LISTED)
    followed = {fix.says: Side(_played(fix.program), fix.allowed) for fix in shown.fixes}
    return Program(name=cause.slug, key=cause, as_it_is=as_it_is, followed=followed)


def _played(source: str) -> Callable[[int], Any]:
    """Both ranks run one file, as a launcher would start it; its folder is the current one."""

    def play(_: int) -> None:
        Path("program.py").write_text(source)
        runpy.run_path("program.py", run_name="__main__")

    return play


def verdict(side: Side) -> Verdict:
    """What `tpcompile.check` would say of the program."""
    records = [_record(side, rank) for rank in range(WORLD_SIZE)]
    rules = capture_rules(timeout_s=1, allowed=side.allowed)
    if side.is_strict:
        rules = replace(rules, taint="fail")
    return conclude(rules, [digest_rank(one) for one in records], fetch_from(records), world_size=WORLD_SIZE)


def _record(side: Side, rank: int) -> RankRecord:
    torch.compiler.reset()
    torch.manual_seed(0)
    begins = _SessionAtGroup(rank)
    compiles = functools.partial(_compile, torch.compile)
    with (
        _restored(rank),
        mock.patch.object(dist, "init_process_group", begins),
        mock.patch.object(torch, "compile", compiles),
        redirect_stdout(sys.stderr),
    ):
        try:
            with suppress(torch._dynamo.exc.TorchDynamoException):
                side.play(rank)
            return begins.record()
        finally:
            begins.end()


def _compile(compile_: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return compile_(*arguments, **{"backend": BACKEND, **options})


@contextmanager
def _restored(rank: int) -> Iterator[None]:
    """A process as each rank begins with, whatever programs before set for the whole of it."""
    _set_defaults()
    num_threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with (
        mock.patch.dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE)),
        torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit),
        torch._functorch.config.patch(activation_memory_budget=1.0),
        torch._inductor.config.patch(max_fusion_size=64),
    ):
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)
            torch.set_default_dtype(dtype)


def _set_defaults() -> None:
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = "none"


class _SessionAtGroup:
    """Records a rank from its first process group on; the group is simulated."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._init = dist.init_process_group
        self._recorded = ExitStack()
        self._session: CaptureSession

    def __call__(self, *_: Any, **__: Any) -> None:
        """Stands for `init_process_group`."""
        self._init("fake", store=FakeStore(), rank=self._rank, world_size=WORLD_SIZE)
        self._session = self._recorded.enter_context(CaptureSession(groups={dist.group.WORLD.group_name: "tp"}))

    def record(self) -> RankRecord:
        """What it recorded."""
        self._recorded.close()
        return self._session.record(
            rank=self._rank, world_size=WORLD_SIZE, domain="tp", coordinate=self._rank, tp_size=WORLD_SIZE
        )

    def end(self) -> None:
        """Leave the group, and the session if a program raised."""
        self._recorded.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _told(found: Verdict) -> dict[str, Any]:
    """What is asserted of a verdict."""
    return {
        "exit_code": found.exit_code,
        "cause": found.lead.cause.value if found.lead else "",
        "listed": [one.cause.value for one in found.divergences],
        "says": found.summary,
        "taints": [taint.kind.value for taint in found.taints if not taint.reason],
    }


def _rows() -> Iterator[tuple[str, dict[str, Any]]]:
    only: Sequence[str] = sys.argv[1:]
    for program in declared():
        if not only or program.name in only:
            followed = {text: _told(verdict(side)) for text, side in program.followed.items()}
            yield program.name, {"as it is": _told(verdict(program.as_it_is)), "followed": followed}


def main() -> None:
    """Print what became of each program, by its name: the verdicts as it is, and with each sentence followed."""
    import json

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        rows = dict(_rows())
    print(json.dumps(rows))


if __name__ == "__main__":
    from tests.advice.played import main as played

    played()
