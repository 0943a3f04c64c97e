"""Recompile reasons, by hand and from live compiles -> guard, count, ranks, line and advice."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.evidence import samples
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.digests.recompiles import recompile_causes
from tpcompile.evidence.judgement.verdict import capture_rules, conclude, fetch_from
from tpcompile.evidence.records import CompileRecord, RecompileCause
from tpcompile.evidence.text.reasons import ReasonKind, in_one_line, parse_reason
from tpcompile.recording import CaptureSession
from tpcompile.report import findings

SIZE = "0/0: tensor 'x' size mismatch at index 1. expected 8, actual 9"


@pytest.mark.parametrize(
    ("text", "kind", "source", "dim", "expected", "actual"),
    [
        (SIZE, ReasonKind.SIZE, "x", 1, "8", "9"),
        ("1/2: tensor 'x' stride mismatch at index 0. expected 16, actual 1", ReasonKind.STRIDE, "x", 0, "16", "1"),
        ("0/0: tensor 'self.w' dtype mismatch. expected Float, actual Long", ReasonKind.DTYPE, "self.w", None, "Float",
         "Long"),
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", ReasonKind.REQUIRES_GRAD, "x", None, "0",
         ""),
        ("0/0: tensor 'x' Tensor device index mismatch. Expected device index to be 0, got 1", ReasonKind.DEVICE, "x",
         None, "0", "1"),
        ("0/0: L['self'].k == 0.5", ReasonKind.NUMBER, "L['self'].k", None, "0.5", ""),
        ("0/0: G['mode'] == 'a # b'", ReasonKind.VALUE, "G['mode']", None, "'a # b'", ""),
        ("0/0: k is None", ReasonKind.VALUE, "k", None, "None", ""),
        ("0/0: GLOBAL_STATE changed: grad_mode ", ReasonKind.GLOBAL_STATE, "", None, "grad_mode", ""),
        ("0/0: ___check_type_id(x, 94), type=<class 'list'>", ReasonKind.TYPE, "x", None, "", ""),
        ("0/0: expected type of 'scale' to be a tensor type, ' but found <class 'float'>", ReasonKind.TYPE, "scale",
         None, "a tensor type", "<class 'float'>"),
        ("0/0: expected type of 'y' to be a tensor type, ' but found <class 'torch.distributed._functional_collectives"
         ".AsyncCollectiveTensor'>", ReasonKind.TENSOR_TYPE, "y", None, "a tensor type",
         "<class 'torch.distributed._functional_collectives.AsyncCollectiveTensor'>"),
        ("something torch has not said before", ReasonKind.OTHER, "", None, "", ""),
    ],
)  # fmt: skip
def test_a_reason_is_read_as_fields(
    text: str, kind: ReasonKind, source: str, dim: int | None, expected: str, actual: str
) -> None:
    found = parse_reason(text)
    assert (found.kind, found.source, found.dim, found.expected, found.actual) == (kind, source, dim, expected, actual)


def test_a_reason_in_one_line_has_no_stack_and_no_spaces_before_the_comment() -> None:
    stack = 'User stack trace:\n  File "/app/model.py", line 56, in forward\n    CALLS += 1'
    text = f"0/1: G['CALLS'] == 1{' ' * 40}# CALLS += 1  # model.py:56 in forward\n{stack}"
    assert in_one_line(text) == "0/1: G['CALLS'] == 1 at /app/model.py:56 in forward"


def test_the_line_is_the_innermost_of_the_users_stack() -> None:
    text = (
        "0/1: self.k == 2    # y = x * self.k  # app/model.py:4 in forward (HINT: make it dynamic)\nUser stack trace:\n"
        '  File "/app/train.py", line 9, in step\n    model(x)\n'
        '  File "/app/model.py", line 4, in forward\n    y = x * self.k'
    )
    found = parse_reason(text)
    assert (found.guard, found.entry, str(found.line)) == ("self.k == 2", "0/1", "/app/model.py:4 in forward")


def test_the_line_is_the_innermost_one_that_is_not_library_code() -> None:
    library = (
        '  File "/venv/lib/site-packages/torch/nn/functional.py", line 3, in normalize\n    raise\n'
        '  File "/src/tpcompile/collectives/api.py", line 5, in all_reduce\n    return x'
    )
    text = f'0/1: k == 2\nUser stack trace:\n  File "/app/train.py", line 9, in step\n    model(x)\n{library}'
    assert str(parse_reason(text).line) == "/app/train.py:9 in step"
    alone = parse_reason(f"0/1: k == 2\nUser stack trace:\n{library}")
    assert str(alone.line) == "/src/tpcompile/collectives/api.py:5 in all_reduce"  # better than none


def test_a_comment_that_names_a_line_of_torch_gives_no_line() -> None:
    code, start = inspect.getsourcelines(torch.nn.functional.relu)
    text = f"0/1: k == 2    # {code[0].strip()}  # nn/functional.py:{{}} in relu"
    assert parse_reason(text.format(start)).line is None
    mine = parse_reason(text.format(start + 1)).line  # another line: a file of the user's that is called alike
    assert str(mine) == f"nn/functional.py:{start + 1} in relu"


def test_object_ids_are_not_part_of_a_guard() -> None:
    texts = [f"0/0: ___check_obj_id(f.__code__, {number}), type=<class 'code'>" for number in (13967589, 14036528)]
    assert len({parse_reason(text).guard for text in texts}) == 1


def causes(*ranks: Sequence[CompileRecord], expected: Sequence[str] = ()) -> tuple[RecompileCause, ...]:
    """Causes over ranks, one argument each."""
    digests = [digest_rank(samples.record(r, *compiles)) for r, compiles in enumerate(ranks)]
    return recompile_causes(digests, expected_phases=expected)


def again(reason: str, *, phase: str = "C/steady", number: int = 1) -> CompileRecord:
    """A recompile."""
    return samples.compiled(phase=phase, compile_id=f"0/{number}", recompile_reasons=(reason,))


def test_recompiles_are_counted_by_guard_over_ranks() -> None:
    other = SIZE.replace("8", "9").replace("actual 9", "actual 10")
    found = causes([again(SIZE), again(other, number=2)], [again(SIZE)])
    assert [(c.count, c.ranks, c.kind, c.values) for c in found] == [(3, (0, 1), "size", "8 -> 9, 9 -> 10")]
    assert "mark_dynamic(x, 1)" in found[0].advice and found[0].phases == ("C/steady",)


def test_two_guards_are_two_causes_the_frequent_first() -> None:
    found = causes([again("0/0: G['k'] == 1"), again(SIZE), again(SIZE, number=2)])
    assert [(c.count, c.kind) for c in found] == [(2, "size"), (1, "Python number")]


def test_a_first_compile_is_no_recompile() -> None:
    assert causes([samples.compiled()]) == ()


def test_a_phase_that_changes_something_on_purpose_is_left_out() -> None:
    assert causes([again(SIZE, phase="C/resized")], expected=["C/resized"]) == ()


class Model(torch.nn.Module):
    """Scales by an attribute."""

    def __init__(self, k: object) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k if self.training else x


def changed(model: Model, **values: Any) -> Callable[[Any], None]:
    """A call after a change of the model."""

    def call(compiled: Any) -> None:
        for name, value in values.items():
            setattr(model, name, value)
        compiled(torch.ones(3))

    return call


def without_grad(compiled: Any) -> None:
    """A call in a different grad mode."""
    with torch.no_grad():
        compiled(torch.ones(4, 8))


def marked(compiled: Any) -> None:
    """A call with a mark that the first call had not."""
    x = torch.ones(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x)


def double(x: Any) -> Any:
    return x * 2


def first(xs: Any) -> Any:
    return next(iter(xs.values() if isinstance(xs, dict) else xs)) * len(xs)


SCALED, INT, MODE = Model(0.5), Model(2), Model(2.0)
T = torch.ones


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("program", "warm", "change", "kind", "advice"),
    [
        (double, T(4, 8), lambda c: c(T(4, 9)), "size", "mark_dynamic(x, 1)"),
        (double, T(8, 16), lambda c: c(T(16, 8).t()), "stride", "x.contiguous()"),
        (double, T(4, 8), lambda c: c(T(4, 8).long()), "dtype", "cast x"),
        (double, T(4, 8), lambda c: c(T(4)), "number of dimensions", "unsqueeze"),
        (double, T(4, 8), lambda c: c(T(4, 8, requires_grad=True)), "requires_grad", "detach()"),
        (double, T(4, 8), without_grad, "global state", "set grad_mode once"),
        (double, T(4, 8), marked, "dynamic mark", "before the first call"),
        (SCALED, T(3), changed(SCALED, k=0.75), "Python number", "self.k as a 0-dim tensor"),
        (INT, T(3), changed(INT, k=3), "int attribute of a module", "keep self.k in a tensor"),
        (MODE, T(3), changed(MODE, training=False), "training mode", "train() or eval()"),
        (first, [T(3)], lambda c: c([T(3), T(3)]), "length", "length of xs"),
        (double, T(4, 8), lambda c: c(2.5), "Python type", "pass x with one Python type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_live_recompile_is_named_with_line_and_advice(
    program: Any, warm: Any, change: Callable[[Any], None], kind: str, advice: str
) -> None:
    with CaptureSession() as session:
        compiled = torch.compile(program, backend="eager")
        with session.phase("first"):
            compiled(warm)
        with session.phase("steady"):
            change(compiled)
    (found,) = recompile_causes([digest_rank(session.record(rank=0, world_size=1))])
    assert (found.kind, found.count, found.phases) == (kind, 1, ("steady",))
    assert advice in found.advice
    assert found.line is not None and found.line.file == __file__


def test_the_verdict_and_the_report_hold_a_table_of_recompiles() -> None:
    records = [samples.record(0, again(SIZE)), samples.record(1, samples.compiled())]
    verdict = conclude(capture_rules(timeout_s=1), [digest_rank(r) for r in records], fetch_from(records), world_size=2)
    console = Console(width=200, record=True, file=io.StringIO())
    for table in findings.tables(verdict):
        console.print(table)
    text = console.export_text()
    assert "index 1" in text and "mark_dynamic(x, 1)" in text and "/app/model.py:3" in text


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (4,))


def test_a_value_that_torch_itself_reads_first_has_the_line_of_the_users_frame(fresh_compiler: None) -> None:
    program = torch.compile(normed, backend="eager")
    with CaptureSession() as session:
        program(torch.ones(2, 4))
        program(torch.ones(2, 4, requires_grad=True))
    (cause,) = recompile_causes([digest_rank(session.record(rank=0, world_size=1))])
    assert cause.line is not None and cause.line.file == normed.__code__.co_filename
    assert cause.line.line - normed.__code__.co_firstlineno in (0, 1)  # 1 with Python 3.12
