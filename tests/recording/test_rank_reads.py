"""Traced code of two gloo ranks -> taints with their lines; programs that only look rank-dependent stay clean."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable

import pytest
import torch

from tests.recording import tainted
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.rank_taint import SUGGESTIONS, find_taints
from tpcompile.evidence.judgement.verdict import fetch_from
from tpcompile.evidence.records import Grade, RankRead, RankRecord, Taint, TaintKind
from tpcompile.recording import CaptureSession
from tpcompile.recording.rank_reads import rank_reads
from tpcompile.testing import run_on_ranks

Records = list[dict[str, RankRecord]]


@pytest.fixture(scope="module")
def records() -> Records:
    """Every program of `tainted`, in one pair of processes."""
    return run_on_ranks(tainted.records)


def taints(records: Records, name: str) -> tuple[Taint, ...]:
    """What is found in one program."""
    ranks = [by_name[name] for by_name in records]
    return find_taints([digest_rank(r) for r in ranks], fetch_from(ranks))


def marked(mark: str) -> int:
    """Number of the line with this mark."""
    lines = linecache.getlines(tainted.__file__)
    return next(number for number, line in enumerate(lines, start=1) if line.rstrip().endswith(f"# MARK {mark}"))


@pytest.mark.parametrize(
    ("name", "what", "kind", "grade", "text"),
    [
        ("attribute", "guard", TaintKind.RANK, Grade.CERTAIN, "L['self'].rank"),
        ("get_rank", "constant", TaintKind.RANK, Grade.CERTAIN, "from dist.get_rank()"),
        ("branch", "read", TaintKind.RANK, Grade.CERTAIN, "dist.get_rank()"),
        ("inlined", "read", TaintKind.RANK, Grade.CERTAIN, "dist.get_rank()"),
        ("group", "read", TaintKind.GROUP_RANK, Grade.CERTAIN, "self.group.rank()"),
        ("mesh", "read", TaintKind.GROUP_RANK, Grade.CERTAIN, "self.mesh.get_local_rank()"),
        ("environment", "guard", TaintKind.ENVIRONMENT, Grade.CERTAIN, "from os.environ['TAINT_TEST']"),
        ("device", "read", TaintKind.DEVICE_INDEX, Grade.CERTAIN, "x.device.index"),
        ("hostname", "read", TaintKind.HOSTNAME, Grade.LIKELY, "socket.gethostname()"),
    ],
)
def test_each_source_is_found_once_with_its_line(
    records: Records, name: str, what: str, kind: TaintKind, grade: Grade, text: str
) -> None:
    (found,) = taints(records, name)
    assert (found.what, found.kind, found.grade) == (what, kind, grade)
    assert text in found.text and bool(found.suggestion) == (found.kind in SUGGESTIONS)
    assert found.line is not None and (found.line.file, found.line.line) == (tainted.__file__, marked(name))


def test_a_constant_that_is_no_rank_is_listed_as_guard_and_as_constant(records: Records) -> None:
    found = taints(records, "constant")
    assert [(t.what, t.kind) for t in found] == [("guard", TaintKind.DIFFERS), ("constant", TaintKind.DIFFERS)]
    assert {t.line.line for t in found if t.line} == {marked("constant")}


def test_what_each_rank_has_is_listed(records: Records) -> None:
    (found,) = taints(records, "branch")
    assert [(g.ranks, g.item.says) for g in found.groups if g.item] == [((0,), "0"), ((1,), "1")]


CLEAN = ["ordinary setting", "eager only", "rank as data", "low rank", "batch like rank", "sharded by DTensor"]


@pytest.mark.parametrize("name", CLEAN)
def test_a_program_that_only_looks_rank_dependent_is_not_listed(records: Records, name: str) -> None:
    assert taints(records, f"clean: {name}") == ()
    assert all(c.rank_reads is not None for by_name in records for c in by_name[f"clean: {name}"].compiles)


def traced(function: Callable[..., torch.Tensor]) -> tuple[RankRead, ...]:
    """Reads found by a live session of this process alone."""
    torch.compiler.reset()
    with CaptureSession() as session:
        torch.compile(function, backend="eager")(torch.ones(3))
    torch.compiler.reset()
    return tuple(read for c in session.compiles() for read in c.rank_reads or ())


def test_a_function_that_is_not_traced_is_not_listed() -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        return x * torch.cuda.current_device()

    def calls(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x is not None else never(x)

    assert traced(calls) == () and len(rank_reads([never.__code__])) == 1


def test_a_read_behind_a_condition_is_not_sure() -> None:
    def maybe(x: torch.Tensor, *, flag: bool = False) -> torch.Tensor:
        if flag:
            return x * torch.cuda.current_device()
        return x * 2

    assert [read.is_sure for read in traced(maybe)] == [False]


def test_a_read_after_a_conditional_return_is_not_sure() -> None:
    def early(x: torch.Tensor, *, flag: bool = True) -> torch.Tensor:
        if flag:
            return x * 2
        return x * torch.cuda.current_device()

    assert [read.is_sure for read in rank_reads([early.__code__])] == [False]


def test_what_follows_an_early_return_under_the_compiler_is_left_out() -> None:
    def eager_tail(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return x * 2
        return x * torch.cuda.current_device()

    assert rank_reads([eager_tail.__code__]) == ()


def test_a_parameter_with_a_modules_name_is_not_the_module() -> None:
    def shadowed(x: torch.Tensor, torch: object) -> object:
        return torch.cuda.current_device()  # type: ignore[attr-defined]  # an object of that name, not the module

    assert rank_reads([shadowed.__code__]) == ()


def test_a_method_of_the_users_own_with_a_rank_name_is_left_to_its_body() -> None:
    class Own:
        def get_rank(self) -> int:
            return 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.get_rank()

    assert traced(Own().forward) == ()


def test_a_secret_in_the_environment_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * len(os.environ["TAINT_TEST_TOKEN"])

    monkeypatch.setenv("TAINT_TEST_TOKEN", "tell nobody")
    (read,) = rank_reads([reads.__code__])
    assert read.variable == "TAINT_TEST_TOKEN" and read.value.startswith("sha256:") and "tell" not in read.to_json()


def test_a_file_is_parsed_once_however_many_compiles_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [f.__code__ for f in vars(tainted).values() if hasattr(f, "__code__")]
    first = rank_reads(codes)
    monkeypatch.setattr(ast, "parse", lambda *_: pytest.fail("parsed again"))
    assert rank_reads(codes) == first != ()
