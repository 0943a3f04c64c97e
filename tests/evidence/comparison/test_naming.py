"""What the generated faults showed to be named wrongly: the rank, the cause or the line, each by its shared reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.evidence.samples import (
    F32,
    between,
    call,
    collective,
    compiled,
    graph,
    guard,
    kernel,
    line,
    lowered,
    only,
    record,
    reduce,
    tensor,
)
from tpcompile.evidence.comparison.compare import compare
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import fetch_from
from tpcompile.evidence.records import CompileRecord, Divergence, Graph, Guard, Item, Layer, Node, UserLine
from tpcompile.evidence.records.causes import Cause

PACKAGE = "/venv/lib/python3.11/site-packages/transformers/modeling.py"
FROZEN = "L['self']._parameters['weight']"
ENVIRON = "G['os'].environ._data[b'RANK']"


def travelled(*compiles: CompileRecord) -> tuple[Divergence, ...]:
    """Compare ranks where the items of all but the first came as sorted JSON."""
    records = [record(rank, compile_, world_size=len(compiles)) for rank, compile_ in enumerate(compiles)]
    own = fetch_from(records)

    def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        items = own(rank, index, layer, part)
        if rank == 0:
            return items
        return [item.model_copy(update={"fields": dict(sorted(item.fields.items()))}) for item in items]

    return compare([digest_rank(one) for one in records], fetch)


def reducing(*calls: Node, **fields: object) -> CompileRecord:
    """A compile whose program follows its collectives."""
    return compiled(call("mul", "%0", "2"), *calls, **fields)


@pytest.mark.parametrize(
    ("theirs", "cause"), [(("max", "sum"), Cause.ORDER_FORWARD), (("sum", "min"), Cause.REDUCE_OP)]
)
def test_collectives_that_came_from_a_different_rank_are_compared_by_name(theirs: Sequence[str], cause: Cause) -> None:
    def issuing(*ops: str) -> CompileRecord:
        issued = tuple(collective(reduce_op=op) for op in ops)
        return reducing(*(reduce("%1", op) for op in ops), collectives=issued)

    assert travelled(issuing("sum", "max"), issuing(*theirs))[0].cause == cause


@pytest.mark.parametrize(("size", "cause"), [("[4, 1]", Cause.FROZEN_PARAMETER), ("[4, 4]", Cause.SHAPE)])
def test_of_two_cache_entries_the_one_with_the_likest_inputs_says_what_changed(size: str, cause: Cause) -> None:
    def variant(number: int, shape: str, *, grad: bool = True, reasons: tuple[str, ...] = ()) -> CompileRecord:
        inputs = (tensor("L['ids']", shape=shape), tensor(FROZEN, requires_grad=grad))
        return compiled(compile_id=f"0/{number}", inputs=inputs, recompile_reasons=reasons)

    reasons = (
        f"0/1: tensor '{FROZEN}' requires_grad mismatch. expected requires_grad=1",
        "0/0: tensor 'ids' size mismatch at index 1. expected 6, actual 1",
    )
    before = [variant(0, "[4, 6]"), variant(1, "[4, 1]")]
    again = variant(2, size, grad=size != "[4, 1]", reasons=reasons)
    found = next(d for d in between(before, [*before, again]) if d.is_red)
    # Of the prompt's entry and the token's, the token's fits but for the parameter.
    assert found.cause == cause


@pytest.mark.parametrize(
    ("reason", "file"),
    [
        ("tensor 'x' stride mismatch at index 0. expected 8, actual 1", "/app/model.py"),
        ("self.depth == 1", PACKAGE),
    ],
    ids=["fed from outside", "read by the package"],
)
def test_a_line_of_an_installed_package_is_blamed_for_what_it_does_itself(reason: str, file: str) -> None:
    inside = UserLine(file=PACKAGE, line=136, function="forward", code="x = hook(x)")
    stack = (line(44), inside)
    text = f'0/0: {reason}\nUser stack trace:\n  File "{PACKAGE}", line 136, in forward\n    x = hook(x)\n'
    first = compiled(line=inside, stack=stack)
    again = compiled(compile_id="0/1", line=inside, stack=stack, recompile_reasons=(text,), guards=())
    found = next(d for d in between([first, again], first) if d.is_red)
    assert found.line is not None
    assert found.line.file == file


def test_a_rank_without_a_collective_of_a_package_is_shown_at_the_program_that_enters_it() -> None:
    """The collective has the package's line, which is where it is issued; the user's file must be in the text, too."""
    issued_at = UserLine(file=PACKAGE, line=136, function="forward", code="x = x.redistribute()")
    frame = {"line": issued_at.model_copy(update={"line": 9}), "stack": (line(44), issued_at)}
    has = compiled(reduce("%0"), collectives=(collective(line=issued_at),), **frame)
    (found,) = between(has, compiled(collectives=(), **frame))
    places = {group.ranks: group.line and group.line.file for group in found.groups}
    assert (found.cause, places) == (Cause.EXTRA_COLLECTIVE, {(0,): PACKAGE, (1,): "/app/model.py"})


def test_a_line_of_a_package_comes_with_the_users_compiled_function_that_leads_to_it() -> None:
    def runs(op: str, file: str) -> CompileRecord:
        return compiled(call(op, "%0").model_copy(update={"line": line(136, file)}), line=line(3))

    packages, users = (only(runs("relu", file), runs("tanh", file)).title for file in (PACKAGE, "/app/layers.py"))
    assert "/app/model.py:3" in packages and "/app/model.py" not in users


@pytest.mark.parametrize(("inside", "cause"), [(33, Cause.REGIONAL_COMPILE), (12, Cause.EXTRA_COMPILE)])
def test_a_layer_that_was_entered_from_what_others_compile_whole_is_a_part_of_it(inside: int, cause: Cause) -> None:
    layer = UserLine(file=PACKAGE, line=88, function="forward_with_checkpointing")
    stack = (line(90).model_copy(update={"function": "main"}), line(inside), layer)
    part = compiled(call("mul", "%0", "2", at=20), line=layer, stack=stack, function="forward_with_checkpointing")
    whole = compiled(call("mul", "%0", "2", at=300), call("mul", "%1", "2", at=300), line=line(30), function="whole")
    assert between(whole, part)[0].cause == cause


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_three_ranks_the_one_that_compiles_otherwise_than_the_others_is_blamed(odd: int) -> None:
    layer, model = line(10), line(30)
    part = compiled(call("mul", "%0", "2", at=12), line=layer)
    whole = compiled(call("mul", "%0", "2", at=12), call("mul", "%1", "2", at=31), line=model)
    found = only(*(part if rank == odd else whole for rank in range(3)))
    assert (found.cause, found.culprits) == (Cause.REGIONAL_COMPILE, (odd,))


@pytest.mark.parametrize(("ops", "culprits"), [(("sin", "cos", "sin"), (1,)), (("sin", "cos", "tan"), ())])
def test_ranks_with_guards_of_their_own_are_grouped_by_program(ops: Sequence[str], culprits: tuple[int, ...]) -> None:
    def ranked(rank: int) -> CompileRecord:
        return compiled(call(f"torch.{ops[rank]}", "%0"), guards=(guard(source="G['RANK']", says=f"== {rank}"),))

    found = only(*map(ranked, range(3)))
    assert (found.cause, found.culprits) == (Cause.RANK_BRANCH, culprits)
    assert found.title == ("RANK == 0 / 1" if culprits else "RANK == 0 / 1 / 2")


@pytest.mark.parametrize("waiting", [0, 1])
def test_the_rank_that_does_not_wait_is_the_one_to_blame(waiting: int) -> None:
    found = only(*(compiled(collectives=(collective(waited=rank == waiting),)) for rank in range(2)))
    assert (found.cause, found.culprits) == (Cause.UNWAITED, (1 - waiting,))


@pytest.mark.parametrize(
    ("change", "cause"),
    [({"waited": False}, Cause.UNWAITED), ({"op": "all_gather_into_tensor"}, Cause.EXTRA_COLLECTIVE)],
)
def test_one_of_two_equal_collectives_is_compared_with_its_own_counterpart(
    change: dict[str, object], cause: Cause
) -> None:
    same = compiled(collectives=(collective(), collective()))
    other = compiled(collectives=(collective(**change), collective()))
    assert only(other, same).cause == cause


@pytest.mark.parametrize("extra_at", [5, 9])
def test_of_equal_collectives_the_one_at_a_line_of_its_own_is_extra(extra_at: int) -> None:
    one, two = collective(line=line(5)), collective(line=line(9))
    kept = two if extra_at == 5 else one
    found = only(compiled(collectives=(one, two)), compiled(collectives=(kept,)))
    assert (found.cause, found.line) == (Cause.EXTRA_COLLECTIVE, line(extra_at))


def test_only_the_property_of_a_tensor_in_which_guards_differ_is_printed() -> None:
    says = "check_tensor(L['x'], Tensor, DispatchKeySet(CPU), torch.float32, requires_grad=False, size=[{}, 8])"
    ours, theirs = (compiled(guards=(guard("TENSOR_MATCH", "L['x']", says.format(size)),)) for size in (4, None))
    assert only(ours, theirs).title.endswith("size 4, 8 / None, 8")


@pytest.mark.parametrize(("is_read", "cause"), [(False, Cause.UNUSED_RESULT), (True, Cause.EXTRA_COLLECTIVE)])
def test_a_result_that_one_rank_drops_explains_what_the_backward_does_not_recompute(
    is_read: bool, cause: Cause
) -> None:
    forward = collective()
    again = collective(phase="backward")
    whole = reducing(reduce("%1"), call("add", "%0", "%2"), collectives=(forward, again))
    less = reducing(reduce("%1"), collectives=(forward.model_copy(update={"used": is_read}),))
    found = only(whole, less)
    assert found.cause == cause


@pytest.mark.parametrize(("traced_to", "file"), [(None, "/app/model.py"), (91, PACKAGE)], ids=["backend", "tracing"])
def test_a_backend_that_fails_is_blamed_at_the_program_that_enters_the_frame(traced_to: int | None, file: str) -> None:
    frame = UserLine(file=PACKAGE, line=88, function="forward")
    failed = UserLine(file=PACKAGE, line=traced_to) if traced_to else None
    stack = (line(44), frame)
    there = compiled(graphs=(), guards=(), line=frame, stack=stack, failure="no compiler", failure_line=failed)
    found = between(compiled(line=frame, stack=stack), there)[0]
    assert found.cause == Cause.COMPILE_FAILED
    assert found.line is not None
    assert found.line.file == file


def test_a_symbolic_size_is_no_reason_to_prefer_an_entry_whose_inputs_are_unknown() -> None:
    reasons = (
        "0/1: tensor 'x' size mismatch at index 0. expected 9, actual 4",
        "0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 1",
    )
    again = compiled(compile_id="0/2", recompile_reasons=reasons, inputs=(tensor(stride="[1, 4]"),), graphs=(graph(),))
    found = next(d for d in between([compiled(), again], [compiled()]) if d.is_red)
    assert found.cause == Cause.STRIDE


@pytest.mark.parametrize("is_traced", [False, True])
def test_inputs_of_a_compile_that_was_cut_while_it_was_traced_are_not_observed(is_traced: bool) -> None:
    both = compiled(inputs=(tensor(), tensor(FROZEN)))
    graphs = both.graphs if is_traced else ()
    cut = compiled(inputs=(tensor(),), graphs=graphs, guards=(), collectives=(), is_cut=True)
    found = [divergence for divergence in between(both, cut) if divergence.layer == Layer.INPUTS]
    assert bool(found) == is_traced


def test_a_branch_that_reorders_the_placeholders_is_blamed_at_its_first_op() -> None:
    """Placeholders come in the order of their first use, and have no line."""
    x = Node(scope="", op="placeholder", target="L_x_", value=F32)
    weight = Node(scope="", op="placeholder", target="L_weight_", value="f32[8][1]cpu")
    out = Node(scope="", op="output", target="output", args=("(%3,)",))
    with_branch = (x, weight, call("mul", "%0", "0.5", at=34), call("norm", "%2", "%1", at=35), out)
    without = (weight, x, call("norm", "%1", "%0", at=35), out)
    ranks = []
    for rank, nodes in enumerate((with_branch, without)):
        read = Guard(type="EQUALS_MATCH", source=ENVIRON, expression=f"{ENVIRON} == b'{rank}'")
        ranks.append(compiled(graphs=(Graph(kind="dynamo", nodes=nodes),), guards=(read,)))
    found = only(*ranks)
    assert found.cause == Cause.RANK_BRANCH
    assert found.line is not None
    assert found.line.line == 34


def test_a_backend_that_lowers_to_different_ops_and_not_to_code_is_named() -> None:
    cast, copy = (call(f"torch.ops.{op}", "%0") for op in ("prims.convert_element_type", "aten._to_copy"))
    for cache in ((), ("fx_graph_cache_hit",)):
        found = only(lowered(cast, kernels=(kernel(),), cache=cache), lowered(copy))
        assert (found.layer, found.cause) == (Layer.LOWERED, Cause.BACKEND)
    assert only(lowered(cast, kernels=(kernel(),)), lowered(copy, kernels=(kernel(),))).cause == Cause.COMPILER_PASS
    loaded = lowered(copy, cache=("aotautograd_cache_hit",))
    assert only(lowered(cast, kernels=(kernel(),)), loaded).cause == Cause.COMPILER_PASS
