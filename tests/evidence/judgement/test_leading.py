"""A finding in one line: what a person reads first."""

from __future__ import annotations

import pytest

from tests.evidence.samples import broken, call, compiled, guard, line, only
from tpcompile.evidence.judgement import leading as lead
from tpcompile.evidence.layers.row_text import spoken
from tpcompile.evidence.records import Check, CheckId, Divergence, Lead, RecompileCause, Status, UserLine
from tpcompile.evidence.records.causes import Cause


def test_the_cause_is_printed_once() -> None:
    found = lead.of_divergence(only(compiled(), compiled(breaks=(broken(at=4),))))
    assert (found.cause, found.ranks, found.is_rank_known, found.line) == (Cause.GRAPH_BREAK, (1,), True, line(4))
    assert lead.summary(found).count(Cause.GRAPH_BREAK.value) == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("L['self']._modules['head']._parameters['weight']", "self.head.weight"),
        ("G['os'].environ._data[b'LOCAL_RANK']", "os.environ['LOCAL_RANK']"),
    ],
)
def test_a_source_is_written_as_the_user_would(source: str, says: str) -> None:
    assert spoken(source) == says


def failed(id_: CheckId) -> Check:
    return Check(id=id_, mode="", status=Status.FAIL, expected="none", observed=id_.value)


def test_a_difference_explains_a_failed_check_unless_that_is_a_cause() -> None:
    divergence = only(compiled(), compiled(breaks=(broken(at=4),)))
    checks = [failed(CheckId.LAYER), failed(CheckId.REPORTED)]
    assert lead.of_run(checks, [divergence], causes={CheckId.REPORTED}) == lead.of_check(checks[1])
    assert lead.of_run(checks, [divergence], causes=()) == lead.of_divergence(divergence)
    assert lead.of_run(checks, [], causes=()) == lead.of_check(checks[0])
    assert lead.of_run([], [], causes=()) is None


def guards_differ() -> Divergence:
    """Ranks whose programs are equal, and one guard is not."""
    return only(compiled(guards=(guard(says="== 1"),)), compiled(guards=(guard(says="== 2"),)))


@pytest.mark.parametrize("wrong", [CheckId.FORWARD, CheckId.CLOBBERED, CheckId.TP_AWARE])
def test_a_wrong_result_comes_before_guards_that_may_fail_some_day(wrong: CheckId) -> None:
    checks = [failed(CheckId.LAYER), failed(wrong)]
    assert guards_differ().is_latent
    assert lead.of_run(checks, [guards_differ()], causes=()) == lead.of_check(checks[1])
    slow = [failed(CheckId.ONE_REGION)]
    assert lead.of_run(slow, [guards_differ()], causes=()) == lead.of_divergence(guards_differ())


def test_a_program_that_differs_explains_the_wrong_result() -> None:
    different = only(compiled(call("mul", "%0", "2")), compiled(call("mul", "%0", "9")))
    assert not different.is_latent
    assert lead.of_run([failed(CheckId.FORWARD)], [different], causes=()) == lead.of_divergence(different)


def again(*, at: str = "/app/train.py", count: int = 4) -> RecompileCause:
    """A guard that failed on two ranks."""
    asked = UserLine(file=at, line=9, function="step")
    return RecompileCause(
        guard="lr == 0.1", kind="value", count=count, ranks=(0, 1), phases=("",), frame="f", line=asked, advice="do."
    )


def test_a_break_in_a_library_comes_after_a_guard_of_the_users_that_fails_again_and_again() -> None:
    of_library = failed(CheckId.OTHER).model_copy(update={"is_of_library": True, "advice": "move it"})
    checks = [failed(CheckId.ONE_REGION), of_library]
    first = lead.of_run(checks, [], causes=(), recompiles=[again()])
    assert first is not None and "lr == 0.1" in first.says and " 4 " in first.says
    assert (first.ranks, first.do_first) == ((0, 1), "do.")
    in_torch = again(at="/venv/lib/python3.11/site-packages/torch/optim/adam.py")
    for recompiles in ([], [again(count=2)], [in_torch]):
        first = lead.of_run(checks, [], causes=(), recompiles=recompiles)
        assert first == lead.of_check(of_library) and first is not None and first.do_first == "move it"
    assert lead.of_run([], [], causes=(), recompiles=[again()]) is None, "recompiles alone are listed"


def test_a_break_of_the_users_own_comes_before_its_recompiles() -> None:
    for of_user in (failed(CheckId.UNBROKEN), failed(CheckId.OTHER)):
        first = lead.of_run([of_user], [], causes={CheckId.UNBROKEN}, recompiles=[again()])
        assert first == lead.of_check(of_user)
    of_library = failed(CheckId.UNBROKEN).model_copy(update={"is_of_library": True})
    first = lead.of_run([of_library], [], causes={CheckId.UNBROKEN}, recompiles=[again()])
    assert first is not None and first.says.startswith("recompiled")


@pytest.mark.parametrize(
    ("consequence", "text"),
    [
        (f"{Cause.STUCK_COLLECTIVE.value}: rank 1 waits", f"so {Cause.STUCK_COLLECTIVE.value}"),
        ("rank 1 waits in all_reduce #9: rank 0 comes later", "so rank 1 waits in all_reduce #9: rank 0 comes later"),
    ],
)
def test_of_what_followed_the_cause_is_said_or_all_where_it_has_none(consequence: str, text: str) -> None:
    found = Lead(cause=Cause.PARTED, says=f"ranks parted; so {consequence}", ranks=(1,), consequence=consequence)
    assert lead.summary(found).endswith(text)
