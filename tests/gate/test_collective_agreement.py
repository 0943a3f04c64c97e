from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.gate.threads import CountingStore, on_threads, stores
from tpcompile import config
from tpcompile.evidence.records import Check, CheckId, Collective, CompileRecord, Graph, GraphBreak, UserLine
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.checks import RESIZED, STEADY
from tpcompile.gate.collective_agreement import Agreement
from tpcompile.gate.status import StatusBoard

CONFIG = config.load("cpu_smoke", ["gate.store_timeout_s=0.5"])


class Ended(Exception):
    """What `end` does instead of leaving the process."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.observed)
        self.check = check


def a_compile(*reduce_ops: str) -> CompileRecord:
    """A frame that issues those all-reduces, one source line each."""
    found = tuple(
        Collective(
            phase="forward", op="all_reduce", reduce_op=op, dtype="f32", shape="[4]", group="tp",
            line=UserLine(file="model.py", line=number),
        )
        for number, op in enumerate(reduce_ops)
    )  # fmt: skip
    graph = Graph(kind="inference", nodes=())
    return CompileRecord(compile_id="0/0", phase="C/first", function="forward", graphs=(graph,), collectives=found)


def an_agreement(
    store: CountingStore,
    folder: Path,
    *,
    mode: str = "C",
    phase: str = "C/first",
    settings: config.JobConfig = CONFIG,
) -> Agreement:
    """This rank's agreement, in that mode and phase."""

    def end(check: Check) -> None:
        raise Ended(check)

    board = StatusBoard(RunDir.create(folder), store)
    board.enter(phase)
    agreement = Agreement(store, settings, board, end)
    agreement.mode = mode
    return agreement


def checks_of(tmp_path: Path, compiles: list[CompileRecord], **place: str) -> list[Check | None]:
    """Each rank compiles its own frame, all at once; the check each one ended with, None when it went on."""
    clients = stores(len(compiles))
    agreements = [an_agreement(client, tmp_path, **place) for client in clients]
    results = on_threads(lambda rank: agreements[rank].on_compile(compiles[rank]), range(len(compiles)))
    assert all(result is None or isinstance(result, Ended) for result in results), results
    return [result.check if result else None for result in results]


def test_equal_collectives_go_on(tmp_path: Path) -> None:
    assert checks_of(tmp_path, [a_compile("sum", "sum")] * 3) == [None] * 3


def test_a_collective_of_a_package_comes_with_the_users_compiled_function(tmp_path: Path) -> None:
    def of_package(op: str) -> CompileRecord:
        made = a_compile(op)
        at = UserLine(file="/venv/lib/python3.11/site-packages/transformers/tp.py", line=305)
        issued = tuple(one.model_copy(update={"line": at}) for one in made.collectives)
        frame = UserLine(file="/app/model.py", line=18, function="forward")
        return made.model_copy(update={"collectives": issued, "line": frame, "stack": (frame,)})

    found = checks_of(tmp_path, [of_package("sum"), of_package("max")])
    assert all(check and check.observed.endswith("forward of /app/model.py:18") for check in found)


def test_differing_reduce_op_blames_the_minority_whichever_rank_judges(tmp_path: Path) -> None:
    found = checks_of(tmp_path, [a_compile("sum", "sum"), a_compile("sum", "max"), a_compile("sum", "sum")])
    assert {(c.id, c.ranks, c.line.line) for c in found if c and c.line} == {(CheckId.AGREED, (1,), 1)}
    assert all(c and c.observed.startswith("#1 is all_reduce(reduce_op=max") for c in found)
    assert all(c and "all_reduce(reduce_op=sum" in c.observed for c in found)


def test_a_rank_that_runs_eagerly_behind_a_graph_break_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective of its eager code waits for the other rank: gate.store_timeout_s would end that after minutes."""
    monkeypatch.setattr("tpcompile.gate.collective_agreement._AFTER_BREAK_S", 0.2)
    line = UserLine(file="model.py", line=7)
    broken = a_compile().model_copy(update={"breaks": (GraphBreak(reason="item", line=line),)})
    clients = stores(2)
    patient = config.load("cpu_smoke", ["gate.store_timeout_s=60"])
    agreements = [an_agreement(client, tmp_path, settings=patient) for client in clients]
    started = time.monotonic()
    compiles = [a_compile("sum"), broken]
    ended, went_on = on_threads(lambda rank: agreements[rank].on_compile(compiles[rank]), range(2))
    assert went_on is None and isinstance(ended, Ended)
    assert ended.check.ranks == (1,) and time.monotonic() - started < 30


@pytest.mark.parametrize(("num_ranks", "blamed"), [(2, ((0, 1), False)), (3, ((2,), True))])
def test_of_two_ranks_that_differ_none_is_blamed_and_of_three_the_one_outside_of_the_majority(
    tmp_path: Path, num_ranks: int, blamed: tuple[tuple[int, ...], bool]
) -> None:
    found = checks_of(tmp_path, [*[a_compile("sum")] * (num_ranks - 1), a_compile("max")])
    assert [c and (c.ranks, c.is_rank_known) for c in found] == [blamed] * num_ranks


@pytest.mark.parametrize(("counts", "who"), [((1, 2, 1), "rank 1"), ((2, 1, 2), "ranks 0,2")])
def test_collective_too_many_or_too_few_names_the_rank_that_issues_it(
    tmp_path: Path, counts: tuple[int, ...], who: str
) -> None:
    found = checks_of(tmp_path, [a_compile(*["sum"] * count) for count in counts])
    assert all(c and c.ranks == (1,) and c.observed.startswith(f"#1 is on {who} only") for c in found)


def without(compiled: CompileRecord, number: int) -> CompileRecord:
    """The same frame with one collective left out; the others keep their lines."""
    rest = tuple(one for place, one in enumerate(compiled.collectives) if place != number)
    return compiled.model_copy(update={"collectives": rest})


@pytest.mark.parametrize("ops", [("sum", "sum", "sum"), ("max", "sum", "avg")])
def test_of_several_collectives_the_one_that_a_rank_leaves_out_is_named(tmp_path: Path, ops: tuple[str, ...]) -> None:
    """Not the last of equal ones, and not the pair that meets in its place."""
    whole = a_compile(*ops)
    found = checks_of(tmp_path, [whole, without(whole, 1)])
    assert {(c.ranks, c.line and c.line.line) for c in found if c} == {((0, 1), 1)}
    assert all(c and c.observed.startswith("#1 ") for c in found)


def test_collectives_in_a_different_order_are_named_in_pairs(tmp_path: Path) -> None:
    found = checks_of(tmp_path, [a_compile("sum", "max"), a_compile("max", "sum")])
    assert all(c and c.observed.startswith("#0 is all_reduce(reduce_op=max") for c in found)
    assert all(c and "all_reduce(reduce_op=sum" in c.observed for c in found)


def test_compile_without_collectives_waits_for_no_rank(tmp_path: Path) -> None:
    store = stores(2)[0]
    an_agreement(store, tmp_path).on_compile(a_compile())
    assert not any(key.startswith("compile/") for key in store.written)


def test_compile_that_failed_is_not_compared(tmp_path: Path) -> None:
    """Its graph was not lowered: it lists the collectives that the user wrote, not those of DTensor."""
    store = stores(2)[0]
    an_agreement(store, tmp_path).on_compile(a_compile("avg").model_copy(update={"failure": "no backward"}))
    assert not any(key.startswith("compile/") for key in store.written)


@pytest.mark.parametrize("mode", ["A", "B"])
def test_modes_that_are_wrong_by_design_are_left_alone(tmp_path: Path, mode: str) -> None:
    assert checks_of(tmp_path, [a_compile("sum"), a_compile("max")], mode=mode) == [None, None]


def test_rank_that_does_not_compile_is_named_with_what_it_does(tmp_path: Path) -> None:
    clients = stores(3)
    StatusBoard(RunDir.create(tmp_path), clients[2]).enter("C/steady")
    agreements = [an_agreement(client, tmp_path) for client in clients[:2]]
    found = on_threads(lambda rank: agreements[rank].on_compile(a_compile("sum")), [0, 1])
    assert [error.check.ranks for error in found] == [(2,), (2,)]
    assert all("rank 2 last seen" in str(error) for error in found)


def test_steady_recompile_with_the_same_collectives_is_left_to_the_verdict(tmp_path: Path) -> None:
    clients = stores(2)
    agreements = [an_agreement(client, tmp_path) for client in clients]
    assert on_threads(lambda rank: agreements[rank].on_compile(a_compile("sum")), [0, 1]) == [None, None]
    agreements[0]._board.enter(f"C/{STEADY}")
    agreements[0].on_compile(a_compile("sum"))  # the other rank never comes, and nobody waits for it


def test_steady_recompile_with_new_collectives_blames_the_rank_that_made_it(tmp_path: Path) -> None:
    agreements = [an_agreement(client, tmp_path) for client in stores(2)]
    on_threads(lambda rank: agreements[rank].on_compile(a_compile("sum")), [0, 1])
    for agreement in agreements:
        agreement._board.enter(f"C/{STEADY}")
    again = [a_compile("sum"), a_compile("sum", "max")]
    unchanged, changed = on_threads(lambda rank: agreements[rank].on_compile(again[rank]), [0, 1])
    assert unchanged is None
    assert changed.check.ranks == (1,)
    assert "rank 1 compiled all_reduce(" in changed.check.observed
    assert "rank 0 did not" in changed.check.observed


def test_recompile_of_one_rank_does_not_shift_the_compiles_of_the_next_phase(tmp_path: Path) -> None:
    agreements = [an_agreement(client, tmp_path) for client in stores(2)]
    on_threads(lambda rank: agreements[rank].on_compile(a_compile("sum")), [0, 1])
    agreements[0]._board.enter(f"C/{STEADY}")
    agreements[0].on_compile(a_compile("sum"))
    for agreement in agreements:
        agreement._board.enter(f"C/{RESIZED}")
    assert on_threads(lambda rank: agreements[rank].on_compile(a_compile("sum")), [0, 1]) == [None, None]
