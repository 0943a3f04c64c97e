"""A compile that only some ranks made -> the guard that failed there, or why it is there at all."""

from __future__ import annotations

import pytest

from tests.evidence.samples import (
    between,
    call,
    collective,
    compiled,
    graph,
    guard,
    line,
    only,
    tensor,
)
from tpcompile.evidence.records import Collective, CompileRecord, DivergenceClass, Node
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.reasons import nearest_reason


@pytest.mark.parametrize(
    ("reason", "cause", "held"),
    [
        ("tensor 'x' size mismatch at index 0. expected 4, actual 8", Cause.SHAPE, "size[0] of 'x' is 4"),
        ("tensor 'x' stride mismatch at index 0. expected 8, actual 1", Cause.STRIDE, "stride[0] of 'x' is 8"),
        ("tensor 'x' dtype mismatch. expected Float, actual Double", Cause.DTYPE, "dtype of 'x' is Float"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=0",
         Cause.REQUIRES_GRAD, "requires_grad of 'x' is 0"),
        ("GLOBAL_STATE changed: grad_mode ", Cause.GRAD_MODE, "grad_mode is unchanged since the first compile"),
        ("GLOBAL_STATE changed: autocast(cpu)_enabled ", Cause.AUTOCAST, ""),
        ("tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU), actual DispatchKeySet(CPU, Python)",
         Cause.DISPATCH_KEY, "dispatch keys of 'x' is DispatchKeySet(CPU)"),
        ("expected type of 'x' to be a tensor type, ' but found <class 'torch.distributed._functional_collectives"
         ".AsyncCollectiveTensor'>", Cause.TENSOR_SUBCLASS, ""),
        ("self.scale == 1", Cause.PYTHON_VALUE, "self.scale == 1"),
        ("G['scale'] == 1", Cause.PYTHON_VALUE, "G['scale'] == 1"),
    ],
)  # fmt: skip
def test_a_one_rank_recompile_is_classified_by_the_guard_that_failed(reason: str, cause: Cause, held: str) -> None:
    again = compiled(compile_id="0/1", recompile_reasons=(f"0/0: {reason}",), guards=(guard(says="== 2"),), step=7)
    found = next(d for d in between([compiled(), again], compiled()) if d.is_red)
    assert (found.cause, found.cls, found.step) == (cause, DivergenceClass.CONTENT, 7)
    assert found.guard == reason.strip() and found.held.startswith(held)
    assert [g.ranks for g in found.groups] == [(1,), (0,)] and all(g.line for g in found.groups)


def test_a_size_that_one_rank_alone_was_fed_is_its_shape_although_torch_makes_it_dynamic() -> None:
    reason = "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 8"
    node = Node(scope="", op="placeholder", target="L_x_", value="f32[s#0, 8][8, 1]cpu")
    dynamic = graph(call("mul", "%0", "2")).model_copy(update={"nodes": (node,)})
    again = compiled(compile_id="0/1", recompile_reasons=(reason,), graphs=(dynamic,))
    found = between([compiled(), again], compiled())[0]
    assert found.cause == Cause.SHAPE
    assert "size[0] of x: 4 / 8, dynamic" in found.title
    assert [group.ranks for group in found.groups] == [(1,), (0,)]


def test_of_two_cache_entries_the_one_that_fitted_best_says_what_changed() -> None:
    sized = compiled(compile_id="0/1", inputs=(tensor(shape="[9, 8]"),))
    reasons = (
        "0/1: tensor 'x' size mismatch at index 0. expected 9, actual 4",
        "0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 1",
    )
    again = compiled(compile_id="0/2", recompile_reasons=reasons, inputs=(tensor(source="L['x']", stride="[1, 4]"),))
    first = compiled(inputs=(tensor(),))
    found = next(d for d in between([first, sized, again], [first, sized]) if d.is_red)
    assert (found.cause, found.held[-4:]) == (Cause.STRIDE, "is 8")
    texts = [g.item.text for g in found.groups if g.item]
    assert "shape=[4, 8] stride=[8, 1]" in texts[0] and "shape=[4, 8] stride=[1, 4]" in texts[1]


@pytest.mark.parametrize(
    ("reasons", "nearest"),
    [
        (("0/1: GLOBAL_STATE changed: grad_mode ",
          "0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 1"), 1),
        (("0/1: tensor 'x' size mismatch at index 0. expected 9, actual 8",
          "0/0: tensor 'x' size mismatch at index 1. expected 8, actual 7"), 1),
        (("0/1: tensor 'x' size mismatch at index 0. expected 6, actual 7",
          "0/0: tensor 'x' size mismatch at index 0. expected 5, actual 7"), 0),
        (("0/0: self.scale == 1",), 0),
    ],
)  # fmt: skip
def test_the_guard_asked_last_belongs_to_the_entry_that_fitted_best(reasons: tuple[str, ...], nearest: int) -> None:
    assert nearest_reason(reasons) == reasons[nearest]
    assert nearest_reason(()) == ""


def test_a_one_rank_recompile_shows_the_guarded_value_of_both_sides() -> None:
    reason = "0/0: self.scale == 1  # y = x * self.scale  # model.py:3 in forward"
    again = compiled(compile_id="0/1", recompile_reasons=(reason,), guards=(guard(source="self.scale", says="== 2"),))
    found = between(
        [compiled(guards=(guard(source="self.scale"),)), again], compiled(guards=(guard(source="self.scale"),))
    )[0]
    assert [g.item.text.rpartition(" == ")[2] if g.item else None for g in found.groups] == ["1", "2"]


def test_a_one_rank_recompile_with_other_collectives_is_a_hang() -> None:
    again = compiled(
        compile_id="0/1", recompile_reasons=("0/0: self.scale == 1",), guards=(guard(says="== 2"),),
        collectives=(collective(), collective()),
    )  # fmt: skip
    assert between([compiled(), again], compiled())[0].cls == DivergenceClass.COLLECTIVES


def test_a_rank_that_exceeds_the_recompile_limit_is_named_with_the_last_reason() -> None:
    gave_up = CompileRecord(
        compile_id="0/1", phase="C/first", function="forward", line=compiled().line, limit_reached=True,
        failure="Dynamo recompile limit exceeded", recompile_reasons=("0/0: self.scale == 1",),
    )  # fmt: skip
    found = between([compiled(), gave_up], compiled())[0]
    assert (found.cause, found.guard, found.groups[-1].ranks) == (Cause.RECOMPILE_LIMIT, "self.scale == 1", (0,))


def test_a_rank_that_compiled_nothing_is_the_one_to_blame() -> None:
    found = only(compiled(), ())
    assert (found.cause, found.groups[-1].ranks) == (Cause.COMPILE_DISABLED, (1,))


def test_an_extra_frame_on_one_rank_blames_the_rank_that_has_it() -> None:
    found = only([compiled(), compiled(function="extra", compile_id="1/0")], compiled())
    assert (found.cause, found.groups[-1].ranks) == (Cause.EXTRA_COMPILE, (0,))


def local(function: str, *, at: int) -> CompileRecord:
    """A compiled function of its own, without collectives."""
    node = call(function, "%0", at=at + 1)
    return compiled(node, function=function, line=line(at), compile_id="1/0", collectives=())


def test_a_function_of_its_own_without_collectives_is_information() -> None:
    evaluation = local("evaluate", at=90)
    found = only([compiled(), evaluation], compiled())
    assert (found.cause, found.cls, found.is_red) == (Cause.EXTRA_COMPILE, DivergenceClass.LABEL, False)


def test_a_function_of_its_own_may_be_compiled_again() -> None:
    reason = "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 7"
    again = local("evaluate", at=90).model_copy(update={"compile_id": "1/1", "recompile_reasons": (reason,)})
    found = between([compiled(), local("evaluate", at=90), again], compiled())
    assert [(one.cause, one.is_red) for one in found] == [(Cause.EXTRA_COMPILE, False), (Cause.SHAPE, False)]


def test_a_shared_function_that_one_rank_compiles_again_is_red() -> None:
    reason = "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 7"
    evaluation = local("evaluate", at=90)
    again = evaluation.model_copy(update={"compile_id": "1/1", "recompile_reasons": (reason,)})
    found = only([compiled(), evaluation, again], [compiled(), evaluation])
    assert (found.cause, found.is_red) == (Cause.SHAPE, True)


@pytest.mark.parametrize("issued", [(), (collective(),)])
def test_a_shared_function_that_one_rank_compiles_again_without_a_reason_is_not_harmless(
    issued: tuple[Collective, ...],
) -> None:
    shared = local("shared", at=90).model_copy(update={"collectives": issued})
    again = shared.model_copy(update={"compile_id": "1/1"})
    found = only([compiled(), shared, again], [compiled(), shared])
    assert found.is_red and "no collective" not in found.advice


def test_a_function_that_runs_in_place_of_a_different_one_is_red() -> None:
    found = between([compiled(), local("gelu", at=90)], [compiled(), local("relu", at=95)])
    assert {d.cause for d in found if d.is_red} == {Cause.EXTRA_COMPILE}
