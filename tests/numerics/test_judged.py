"""numerics/judged: numbers of a tensor beside those of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tpcompile.evidence.records import MistakeKind, UserLine
from tpcompile.numerics.fingerprints import NUM_SUMS, Part, fingerprint
from tpcompile.numerics.judged import Judged, Known, Total, as_text, is_near, multiple_of, sums_over_ranks
from tpcompile.numerics.judged_run import Evidence
from tpcompile.numerics.judging import all_judged
from tpcompile.numerics.mistakes import described
from tpcompile.numerics.trace import Axis, Trace, Value
from tpcompile.numerics.traced import traced_call


def test_numbers_whose_squares_are_no_floats_are_compared() -> None:
    """As those of a gradient that has run away."""
    huge = (1e200, -3e220, 5e180)
    assert is_near(huge, huge, 1e-6)
    assert not is_near(huge, tuple(2 * number for number in huge), 1e-6)
    assert multiple_of(tuple(2 * number for number in huge), huge) == pytest.approx(2)
    assert not is_near((math.inf, 1.0), (math.inf, 1.0), 1e-6)
    assert not is_near((1.0, 1.0), (math.inf, 1.0), 1e-6)
    assert multiple_of((1.0, 2.0), (0.0, 0.0)) == 0


def test_what_a_right_result_was_made_of_is_right_and_its_copies_are() -> None:
    """The reference has a value of that shape, and none that is equal."""
    known = Known.of([Trace([Value("aten.add", (2,), (1.0,) * NUM_SUMS, (), None)])])
    own = [
        Value("aten.mul", (2,), (5.0,) * NUM_SUMS, (), None),
        Value("aten.detach", (2,), (5.0,) * NUM_SUMS, (), None, (0,)),
    ]
    of_right = [
        all_judged(own, known, [], tolerance=1e-5, rank=0, size=2, of_right=places).judged for places in ((), {0})
    ]
    assert of_right == [[Judged.WRONG] * 2, [Judged.PART] * 2]


def test_scores_that_are_wrong_are_wrong_once_they_are_masked() -> None:
    scores = torch.linspace(-2, 2, 64).view(8, 8)
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    right, wrong = (fingerprint((scores * factor).masked_fill(future, -math.inf)) for factor in (1.0, 1.02))
    assert is_near(right, right, 1e-5) and not is_near(wrong, right, 1e-3)


def judged_by_line(own: Trace, known: Known, *, rank: int = 1) -> dict[str, Judged]:
    """Op -> how its last value is right."""
    judged = all_judged(own.values, known, [], tolerance=1e-5, rank=rank, size=2).judged
    return {value.name: each for value, each in zip(own.values, judged, strict=True)}


def count(chosen: torch.Tensor) -> Trace:
    """A running count, as a router has it; each run has the same lines."""
    return traced_call(lambda: {"count": (chosen - 1).clamp(0, 3).cumsum(0) * 2}, None, size=2)


def test_an_integer_is_wrong_where_its_own_line_makes_another_of_the_same() -> None:
    """On the second rank the count begins again; on the first it is that of the whole."""
    chosen = torch.arange(1, 9)
    known = Known.of([count(chosen)])
    second = judged_by_line(count(chosen[4:]), known)
    assert (second["aten.clamp"], second["aten.cumsum"], second["aten.mul"]) == (
        Judged.PART, Judged.WRONG, Judged.WRONG,
    )  # fmt: skip
    assert judged_by_line(count(chosen[:4]), known, rank=0)["aten.cumsum"] == Judged.PART


@pytest.mark.parametrize(("limit", "wanted"), [(60, Judged.WRONG), (99, Judged.PART)], ids=["wrong", "all fit"])
def test_a_wrong_mask_that_leaves_all_as_it_was_is_wrong_and_so_are_its_views(limit: int, wanted: Judged) -> None:
    """The second rank counts from its own first place: there all of it fits, and nothing is masked."""

    def kept(x: torch.Tensor) -> Trace:
        def call() -> dict[str, torch.Tensor]:
            fits = (x * 8).long().cumsum(0) <= limit
            return {"kept": torch.where(fits, x, torch.zeros_like(x)).unsqueeze(1) * 2}

        return traced_call(call, None, size=2)

    x = torch.linspace(1, 2, 8)
    second = judged_by_line(kept(x[4:]), Known.of([kept(x)]))
    assert (second["aten.where"], second["aten.unsqueeze"]) == (wanted, wanted)


def test_an_integer_that_was_given_something_else_is_not_judged_by_its_line() -> None:
    """Places in the rank's own rows of a table begin at 0 on each rank."""

    def local(ids: torch.Tensor, first: int) -> Trace:
        return traced_call(lambda: {"local": (ids - first).clone()}, None, size=2)

    ids = torch.tensor([1, 5, 6, 2])
    assert judged_by_line(local(ids, 4), Known.of([local(ids, 0)]))["aten.sub"] == Judged.PART


@pytest.mark.parametrize(
    ("used", "wanted"),
    [
        (lambda one, other: torch.cat((other, one)), Judged.WRONG),  # nothing sends it
        (lambda one, other: other * one, Judged.WRONG),
    ],
    ids=["put together", "multiplied"],
)
def test_a_part_of_a_different_rank_is_wrong_unless_it_is_sent(
    used: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], wanted: Judged
) -> None:
    whole = torch.arange(64.0).view(8, 8).sin()

    def call() -> dict[str, torch.Tensor]:
        one, other = (whole + 0.0).split(4)
        return {"y": used(one, other)}

    trace = traced_call(call, None, size=2)
    known = Known.of([traced_call(lambda: {"x": whole + 0.0}, None, size=2)])
    judged = all_judged(trace.values, known, [], tolerance=1e-5, rank=0, size=2).judged
    pieces = [each for value, each in zip(trace.values, judged, strict=True) if value.name == "aten.split"]
    assert pieces == [Judged.PART, wanted]
    sent = [*trace.values, Value("_c10d_functional.all_to_all_single", (8, 8), None, (), None, (len(judged) - 1,))]
    judged = all_judged(sent, known, [], tolerance=1e-5, rank=0, size=2).judged
    pieces = [each for value, each in zip(sent, judged, strict=True) if value.name == "aten.split"]
    assert pieces[1] == (Judged.PART if used(whole, whole).shape[0] > 8 else wanted)


def test_what_another_axis_of_the_mesh_cuts_is_a_part_and_a_sum_over_the_ranks_may_be_of_it() -> None:
    x = torch.arange(64.0).view(4, 16).cos()

    def known(*axes: Axis) -> Known:
        whole = traced_call(lambda: {"x": x + 0.0}, None, size=2, axes=axes)
        return Known.of([whole], axes=[axis.size for axis in axes])

    own = traced_call(lambda: {"x": x[2:] + 0.0}, None)
    assert judged_by_line(own, known(Axis(2, 1)), rank=0)["aten.add"] == Judged.PART
    assert judged_by_line(own, known(Axis(2, 0)), rank=0)["aten.add"] == Judged.WRONG
    assert judged_by_line(own, known(), rank=0)["aten.add"] == Judged.WRONG


def test_lines_of_two_programs_are_told_apart() -> None:
    line = UserLine(file="model.py", line=3)
    other = Value("aten.cumsum", (4,), (1.0,) * NUM_SUMS, (), line, is_float=False)
    own = Value("aten.cumsum", (4,), (2.0,) * NUM_SUMS, (), UserLine(file="model.py", line=4), is_float=False)
    known = Known.of([Trace([other])])
    assert all_judged([own], known, [], tolerance=1e-5, rank=0, size=2).judged == [Judged.PART]
    same = Value("aten.cumsum", (4,), (2.0,) * NUM_SUMS, (), line, is_float=False)
    assert all_judged([same], known, [], tolerance=1e-5, rank=0, size=2).judged == [Judged.WRONG]


def test_the_first_in_another_order_is_found_however_many_follow() -> None:
    """A chain of more values than Python may call functions one in another."""
    x = torch.linspace(-1, 2, 64).view(8, 8)
    right = traced_call(lambda: {"x": x + 0.0}, None)
    moved = traced_call(lambda: {"x": x.flip(0)}, None).values[-1]
    values = [replace(moved, sources=() if place == 0 else (place - 1,)) for place in range(3_000)]
    known = Known.of([right])
    found = Evidence(values, [Judged.WRONG] * len(values), known, [], tolerance=1e-5, rank=0, size=2)
    assert found.first_in_other_order(len(values) - 1) == 0
    near = replace(moved, tensor=tuple(1.0001 * number for number in right.values[-1].tensor or ()))
    beside = Evidence([near], [Judged.WRONG], known, [], tolerance=1e-5, rank=0, size=2)
    assert beside.first_in_other_order(0) is None  # wrong by little is no other order


def test_rows_that_a_program_spreads_in_an_order_of_its_own_are_right_and_rows_that_an_op_moves_are_not() -> None:
    """The first and the last quarter on one rank, the others on the other; what is made of them row by row is right."""
    x = torch.arange(64.0).view(8, 8).sin()
    known = Known.of([traced_call(lambda: {"y": (x + 0.0) * 2.0}, None, size=2)])

    def of_rank(rows: list[int]) -> Trace:
        def call() -> dict[str, torch.Tensor]:
            doubled = x.index_select(0, torch.tensor(rows)) * 2.0
            return {"y": doubled, "moved": doubled.flip(0)}

        return traced_call(call, None)

    ranks = [of_rank([0, 1, 6, 7]), of_rank([2, 3, 4, 5])]
    sums = sums_over_ranks([as_text(rank) for rank in ranks])
    judged = all_judged(ranks[0].values, known, sums, tolerance=1e-5, rank=0, size=2).judged
    found = {value.name: each for value, each in zip(ranks[0].values, judged, strict=True)}
    assert (found["aten.mul"], found["aten.flip"]) == (Judged.PART, Judged.WRONG)


def test_what_a_rank_has_beside_padding_is_not_wrong() -> None:
    right = Trace([Value("aten.mm", (2, 13), (1.0,) * NUM_SUMS, (), None)])
    own = [Value("aten.mm", (2, 13), (3.0,) * NUM_SUMS, (), None)]
    known = [Known.of([right], padded=lengths) for lengths in ((), {13})]
    judged = [all_judged(own, each, [], tolerance=1e-5, rank=0, size=2).judged for each in known]
    assert judged == [[Judged.WRONG], [Judged.PART]]


@pytest.mark.parametrize(
    ("given", "kind"), [(Judged.PART, MistakeKind.CROSSES), (Judged.WHOLE, MistakeKind.UNKNOWN)], ids=["part", "whole"]
)
def test_padding_of_a_part_crosses_shards(given: Judged, kind: MistakeKind) -> None:
    x = Value("an input", (4, 8), (1.0,) * NUM_SUMS, (), None, is_given=True)
    padded = Value("aten.constant_pad_nd", (5, 8), (2.0,) * NUM_SUMS, (), None, (0,))
    found = Evidence([x, padded], [given, Judged.WRONG], Known(), [], tolerance=1e-5, rank=0, size=2)
    assert described(1, found).kind == kind


@pytest.mark.parametrize(
    ("is_known", "kind", "place"), [(False, MistakeKind.LOCAL_STATISTIC, 2), (True, MistakeKind.NOT_SUMMED, 0)]
)
def test_a_summand_may_be_divided_but_not_by_a_count_of_the_ranks_own(
    is_known: bool, kind: MistakeKind, place: int
) -> None:
    """A divisor that the reference has leaves the summand to blame."""
    summand = Value("aten.mm", (4,), (1.0,) * NUM_SUMS, (), None)
    mask = Value("aten.ge", (4,), (2.0,) * NUM_SUMS, (), None, is_float=False)
    count = Value("aten.sum", (4,), (3.0,) * NUM_SUMS, (), None, (1,))
    divided = Value("aten.div", (4,), (5.0,) * NUM_SUMS, (), None, (0, 2))
    known = Known.of([Trace([replace(count, sources=())])] if is_known else [])
    judged = [Judged.PARTIAL, Judged.PART, Judged.PART, Judged.WRONG]
    found = Evidence([summand, mask, count, divided], judged, known, [], tolerance=1e-5, rank=0, size=2)
    assert (described(3, found).kind, described(3, found).place) == (kind, place)


@pytest.mark.parametrize(("firsts", "wanted"), [((0, 4), Judged.PART), ((4, 4), Judged.WRONG)])
def test_places_that_begin_at_0_on_every_rank_are_right_beside_the_first_place_of_each(
    firsts: tuple[int, int], wanted: Judged
) -> None:
    """Beside a number that all ranks have alike, the negative control, they are not."""
    line = UserLine(file="model.py", line=3)
    places = torch.arange(4.0)

    def of_rank(first: int) -> list[Value]:
        given = Value(
            "places", (4,), fingerprint(places), (), line, moments=(3.7, 6.0, 3.0), is_float=False, is_given=True
        )
        own = Value("first", (), (float(first),) * NUM_SUMS, (), line, is_float=False, is_given=True)
        return [given, own, Value("aten.add", (4,), None, (), line, (0, 1), is_float=False)]

    whole = traced_call(lambda: {"x": torch.arange(8.0) + 0.0}, None, size=2).values[0]
    known = Known.of([Trace([replace(whole, name="places", is_given=True)])])
    ranks = [of_rank(first) for first in firsts]
    sums = sums_over_ranks([as_text(Trace(values)) for values in ranks], rank=1)
    assert all_judged(ranks[1], known, sums, tolerance=1e-5, rank=1, size=2).judged[0] == wanted


@pytest.mark.parametrize(("scale", "wanted"), [(2.0, Judged.PART), (3.0, Judged.WRONG)])
def test_a_gradient_of_the_own_mean_is_right_where_the_ranks_of_another_axis_take_the_mean(
    scale: float, wanted: Judged
) -> None:
    x = torch.arange(64.0).view(4, 16).cos()
    axes = (Axis(2, 1),)
    whole = traced_call(lambda: {"x": x + 0.0}, None, size=2, axes=axes)
    known = Known.of([whole], axes=[2])
    own = traced_call(lambda: {"x": x[2:] * scale}, None).values[-1]
    gradients = [replace(own, sources=(), in_backward=in_backward) for in_backward in (True, False)]
    judged = [all_judged([each], known, [], tolerance=1e-5, rank=0, size=2).judged for each in gradients]
    assert judged == [[wanted], [Judged.WRONG]], "no value of the forward pass is a multiple of the right one"


def test_a_loop_over_ranks_makes_what_one_rank_has_nowhere_and_carries_what_one_rank_has() -> None:
    """Two passes where one rank has one; in the end the sum that is carried is the same. A wrong one is told there."""
    line = UserLine(file="ring.py", line=7)

    def run(*numbers: float) -> list[Value]:
        values = [Value("an input", (4,), (9.0,) * NUM_SUMS, (), None, is_given=True)]
        total = 0.0
        for number in numbers:
            total += number
            part = Value("aten.mul", (4,), (number,) * NUM_SUMS, (), line, (0,))
            carried = Value("aten.add", (4,), (total,) * NUM_SUMS, (), line, (max(0, len(values) - 1), len(values)))
            values += [part, carried]
        return [*values, Value("aten.neg", (4,), (-total,) * NUM_SUMS, (), None, (len(values) - 1,))]

    known = Known.of([Trace(run(6.0))])
    found = [all_judged(run(2.0, last), known, [], tolerance=1e-5, rank=0, size=2).judged for last in (4.0, 5.0)]
    assert found[0] == [Judged.WHOLE, *[Judged.PART] * 3, Judged.WHOLE, Judged.WHOLE]
    assert found[1] == [Judged.WHOLE, *[Judged.PART] * 3, Judged.WRONG, Judged.WRONG]
    alone = all_judged(run(2.0, 4.0), known, [], tolerance=1e-5, rank=0, size=3).judged
    assert alone[1] == Judged.WRONG, "the negative control: three ranks would run it three times"


@pytest.mark.parametrize(("axes", "wanted"), [((2,), Judged.AVERAGED), ((), Judged.WRONG)])
def test_a_sum_along_one_axis_of_means_along_another_is_right(axes: tuple[int, ...], wanted: Judged) -> None:
    """Four ranks have summands over two and means over two: their sum is twice the right one."""
    right = Value("aten.sum", (3,), (1.0,) * NUM_SUMS, (), None)
    own = Value("aten.sum", (3,), (0.3,) * NUM_SUMS, (), None)
    total = Total((0.7,) * NUM_SUMS, 0.0, elsewhere=(((2.0,) * NUM_SUMS, 4),))
    known = Known.of([Trace([right])], axes=axes)
    assert all_judged([own], known, [total], tolerance=1e-5, rank=0, size=2).judged == [wanted]


@pytest.mark.parametrize(("name", "is_told"), [("aten.add_", True), ("aten.mul_", False)])
def test_a_gradient_that_was_summed_and_is_accumulated_before_the_next_sum_is_told_at_the_sum(
    name: str, is_told: bool
) -> None:
    """Of micro-batches: what autograd adds has no line of its own. A product, the negative control, adds nothing."""
    line = UserLine(file="train.py", line=9)
    first = Value("c10d.allreduce_", (3,), (1.0,) * NUM_SUMS, (), UserLine(file="train.py", line=4))
    second = Value("aten.sum", (3,), (2.0,) * NUM_SUMS, (), None, in_backward=True)
    added = Value(name, (3,), (3.0,) * NUM_SUMS, (), None, (0, 1), in_backward=True)
    summed = Value("c10d.allreduce_", (3,), (5.0,) * NUM_SUMS, (), line, (2,))
    judged = [Judged.WHOLE, Judged.PARTIAL, Judged.WRONG, Judged.WRONG]
    found = Evidence([first, second, added, summed], judged, Known(), [], tolerance=1e-5, rank=0, size=2)
    told = described(2, found)
    assert (told.kind == MistakeKind.PER_RANK, told.line == line) == (is_told, is_told)


@pytest.mark.parametrize(("given", "kind"), [(Judged.AVERAGED, MistakeKind.WRONG_GROUP), (Judged.PART, None)])
def test_means_of_replicas_that_are_summed_with_those_of_other_shards_are_in_the_wrong_group(
    given: Judged, kind: MistakeKind | None
) -> None:
    gradient = Value("aten.mm", (3,), (1.0,) * NUM_SUMS, (), None, in_backward=True)
    summed = Value("c10d.allreduce_", (3,), (5.0,) * NUM_SUMS, (), None, (0,))
    found = Evidence([gradient, summed], [given, Judged.WRONG], Known(), [], tolerance=1e-5, rank=0, size=2)
    assert (described(1, found).kind == MistakeKind.WRONG_GROUP) == (kind is not None)


def test_a_late_value_begins_with_the_update_that_came_too_early() -> None:
    """The weights that follow others are updated before those are; then the loss of the next step is late."""
    lines = {name: UserLine(file="train.py", line=number) for number, name in enumerate("abcd", start=1)}

    def run(*, is_early: bool) -> Trace:
        def value(name: str, number: float, line: str, *sources: int) -> Value:
            return Value(name, (4,), (number,) * NUM_SUMS, (), lines[line], sources, is_given=not sources)

        student, teacher = value("student", 2.0, "a"), value("teacher", 3.0, "a")
        if is_early:  # the teacher follows the student of before, from which it does not differ
            follow, step = value("aten.lerp_", 3.0, "b", 1, 0), value("aten.add_", 5.0, "c", 0)
            return Trace([student, teacher, follow, step, value("aten.sub", 2.7, "d", 3, 2)])
        step, follow = value("aten.add_", 5.0, "c", 0), value("aten.lerp_", 4.0, "b", 1, 2)
        return Trace([student, teacher, step, follow, value("aten.sub", 1.0, "d", 2, 3)])

    own, known = run(is_early=True), Known.of([run(is_early=False)])
    judged = all_judged(own.values, known, [], tolerance=1e-5, rank=0, size=2).judged
    found = Evidence(own.values, [*judged[:4], Judged.WRONG], known, [], tolerance=1e-5, rank=0, size=2)
    told = described(4, found)
    assert (told.about, told.line) == ("aten.lerp_", lines["b"])


def test_a_value_is_late_beside_the_same_pass_through_its_line_only() -> None:
    """The first of two passes was given what the reference's second one is given, but for the newest value."""
    lines = {name: UserLine(file="train.py", line=number) for number, name in enumerate("abc", start=1)}

    def run(*made: tuple[float, float, float]) -> Trace:
        values: list[Value] = []
        for score, target, loss in made:
            at = len(values)
            values += [
                Value("aten.tanh", (4,), (score,) * NUM_SUMS, (), lines["a"]),
                Value("targets", (4,), (target,) * NUM_SUMS, (), lines["b"], is_given=True),
                Value("aten.dot", (4,), (loss,) * NUM_SUMS, (), lines["c"], (at, at + 1)),
            ]
        return Trace(values)

    known = Known.of([run((2.0, 3.0, 11.0), (5.0, 7.0, 13.0))])
    found = {}
    for name, own in {
        "first": run((2.0, 7.0, 17.0), (5.0, 7.0, 13.0)),
        "second": run((2.0, 3.0, 11.0), (2.0, 7.0, 17.0)),
    }.items():
        judged = all_judged(own.values, known, [], tolerance=1e-5, rank=0, size=2).judged
        wrong = judged.index(Judged.WRONG)
        evidence = Evidence(own.values, judged, known, [], tolerance=1e-5, rank=0, size=2)
        found[name] = described(wrong, evidence).kind
    assert (found["first"] == MistakeKind.LATE, found["second"]) == (False, MistakeKind.LATE)


@pytest.mark.parametrize(("piece", "kind"), [(3.0, MistakeKind.UNKNOWN), (4.0, MistakeKind.ORDER)])
def test_parts_that_are_taken_out_one_by_one_were_not_put_together_wrongly(piece: float, kind: MistakeKind) -> None:
    """They lie side by side in another shape than on one rank; each piece is right."""
    part = Part(1, (1, 4), (3.0,) * NUM_SUMS)
    whole = Value("aten.mm", (1, 8), (9.0,) * NUM_SUMS, (part,), None, moments=(6.0, 2.0, 1.0))
    gathered = Value(
        "_c10d_functional.all_gather_into_tensor", (2, 4), (8.0,) * NUM_SUMS, (), None, moments=(6.0, 2.0, 1.0)
    )
    taken = Value("aten.slice", (1, 4), (piece,) * NUM_SUMS, (), None, (0,))
    wrong = Value("aten.exp", (5,), (7.0,) * NUM_SUMS, (), None, (1,))
    judged = [Judged.PART, Judged.PART, Judged.WRONG]
    found = Evidence([gathered, taken, wrong], judged, Known.of([Trace([whole])]), [], tolerance=1e-5, rank=0, size=2)
    assert described(2, found).kind == kind


def test_of_places_that_are_used_in_a_line_of_the_reference_the_line_that_passes_them_is_told() -> None:
    """Where the reference does not run that line, the negative control, it is the line itself."""

    def turned(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x * places.cos()

    def of_rank() -> dict[str, torch.Tensor]:
        return {"x": turned(own_rows, own_places)}

    rows, places = torch.arange(8.0).sin(), torch.arange(8.0)
    own_rows, own_places = rows[:4].clone(), places[4:].clone()
    reference = traced_call(lambda: {"x": turned(rows, places)}, None, size=2)
    own = traced_call(of_rank, None).values
    judged = [Judged.PART] * (len(own) - 1) + [Judged.WRONG]
    in_own_order = {own[-1].sources[0]}
    told = []
    for known in (Known.of([reference]), Known()):
        found = Evidence(own, judged, known, [], tolerance=1e-5, rank=0, size=2, own_order=in_own_order)
        op = described(len(own) - 1, found)
        assert op.kind == MistakeKind.OTHER_PART and op.is_given and op.line is not None
        told.append(op.line.function)
    assert told == ["of_rank", "turned"]
