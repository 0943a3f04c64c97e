"""Stacks of compiles, as trace files hold them -> callables that do not run as one region."""

from __future__ import annotations

from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.digests.split_regions import runs_at, skipped_frame, split_note, splits_of
from tpcompile.evidence.records import CheckId, CompileRecord, Graph, RankRecord, SkippedFrame, Status, UserLine

MAIN = UserLine(file="/job/train.py", line=40, function="main")
WRAPPER = UserLine(file="/venv/site-packages/torch/_dynamo/eval_frame.py", line=1166, function="compile_wrapper")
CALL = UserLine(file="/venv/site-packages/torch/nn/modules/module.py", line=1789, function="_call_impl")
IN_STACK = UserLine(file="/job/model.py", line=19, function="forward")
STACK = UserLine(file="/job/model.py", line=17, function="forward")
BLOCK = UserLine(file="/job/model.py", line=5, function="forward")
BROKE_AT = UserLine(file="/job/debug.py", line=12)


def compiled(*stack: UserLine, failure: str = "") -> CompileRecord:
    """A compile of the last line's frame."""
    return CompileRecord(
        compile_id="0/0", phase="step", function="forward", line=stack[-1], stack=stack,
        graphs=() if failure else (Graph(kind="dynamo", nodes=()),), failure=failure,
        failure_line=BROKE_AT if failure else None,
    )  # fmt: skip


def record(*compiles: CompileRecord) -> RankRecord:
    """A rank without counts, as from a trace file."""
    return RankRecord(rank=0, world_size=1, compiles=compiles)


def test_the_callable_itself_runs_at_no_line_of_a_different_frame() -> None:
    assert runs_at(compiled(MAIN, WRAPPER, CALL, STACK)) is None


def test_a_frame_inside_of_it_runs_at_the_line_that_calls_it() -> None:
    assert runs_at(compiled(MAIN, WRAPPER, CALL, IN_STACK, CALL, BLOCK)) == IN_STACK


def test_a_callable_compiled_inside_of_another_callable_is_listed_separately() -> None:
    assert runs_at(compiled(MAIN, WRAPPER, IN_STACK, WRAPPER, CALL, BLOCK)) is None


def test_a_healthy_job_has_no_split() -> None:
    healthy = digest_rank(record(compiled(MAIN, WRAPPER, CALL, STACK)))
    assert healthy.splits == () and split_note([healthy]) == []


def test_a_piece_is_reported_with_the_failed_compile_of_the_code_around_it() -> None:
    failed = compiled(MAIN, WRAPPER, CALL, STACK, failure="Failed to trace builtin operator")
    piece = compiled(MAIN, WRAPPER, CALL, IN_STACK, CALL, BLOCK)
    (split,) = splits_of(record(failed, piece))
    assert (split.runs_at, split.pieces) == (IN_STACK, (BLOCK,))
    assert split.skipped is not None and split.skipped.broke_at == BROKE_AT
    (note,) = split_note([digest_rank(record(failed, piece))])
    assert (note.name, note.status, note.line) == (CheckId.ONE_REGION.text, Status.INFO, BROKE_AT)


def test_a_failed_compile_of_a_different_function_of_that_name_is_not_the_cause() -> None:
    later = SkippedFrame(line=UserLine(file="/job/model.py", line=90, function="forward"), reason="x")
    elsewhere = SkippedFrame(line=UserLine(file="/job/other.py", line=1, function="forward"), reason="x")
    nearer = SkippedFrame(line=STACK, reason="y")
    farther = SkippedFrame(line=BLOCK, reason="x")
    assert skipped_frame(IN_STACK, [later, elsewhere]) is None
    assert skipped_frame(IN_STACK, [farther, nearer, later]) == nearer
