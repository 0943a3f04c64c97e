"""What ranks differ in -> the cause that is named, each with its advice."""

from __future__ import annotations

import pytest

from tests.evidence.samples import (
    between,
    broken,
    call,
    collective,
    compiled,
    graph,
    guard,
    kernel,
    line,
    lowered,
    only,
    reduce,
    tensor,
)
from tpcompile.evidence.records import CompileRecord, DivergenceClass, Guard, Node
from tpcompile.evidence.records.causes import ADVICE, Cause
from tpcompile.evidence.text import normalise

FUNCTIONAL = "torch.ops._c10d_functional."


def test_advice_is_whole_sentences_of_which_the_first_stands_alone() -> None:
    for cause, texts in ADVICE.items():
        assert cause.advice == " ".join(texts)
        assert not texts[0].startswith("Or ") and all(text.startswith("Or ") for text in texts[1:])
        assert not [text for text in texts if "\n" in text or not text.endswith(".") or ". " in text]
    assert Cause.KILLED.advice == ""


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"shape": "[4, 9]", "stride": "[9, 1]"}, Cause.SHAPE),
        ({"stride": "[1, 4]"}, Cause.STRIDE),
        ({"dtype": "bfloat16"}, Cause.DTYPE),
        ({"requires_grad": True}, Cause.REQUIRES_GRAD),
        ({"device": "device(type='cuda')"}, Cause.DISPATCH_KEY),
        ({"dynamic": '{"0": 1}'}, Cause.AUTOMATIC_DYNAMIC),
    ],
)
def test_the_property_of_an_input_that_differs_is_the_cause(change: dict[str, object], cause: Cause) -> None:
    found = only(compiled(), compiled(inputs=(tensor(**change),)))
    assert (found.cause, found.advice) == (cause, cause.advice)


def test_a_size_that_is_a_symbol_on_one_rank_only_is_automatic_dynamic() -> None:
    symbolic = Node(scope="", op="placeholder", target="L_x_", value="f32[s#0, 8][8, 1]cpu")
    static = graph(call("mul", "%0", "2"), reduce("%1"))
    dynamic = static.model_copy(update={"nodes": (symbolic, *static.nodes[1:])})
    found = only(compiled(), compiled(inputs=(tensor(shape="[5, 8]"),), graphs=(dynamic,)))
    assert found.cause == Cause.AUTOMATIC_DYNAMIC


@pytest.mark.parametrize(
    ("ours", "theirs", "cause"),
    [
        (call("mul", "%0", "1"), call("mul", "%0", "2"), Cause.RANK_CONSTANT),
        (call("mul", "%0", "2"), call("torch.relu", "%0"), Cause.RANK_BRANCH),
        (call("mul", "%0", "2"), call("mul", "%0", "2", value="f64[4, 8][8, 1]cpu"), Cause.DTYPE),
        (call("mul", "%0", "2"), call("mul", "%0", "2", value="f32[4, 8][1, 4]cpu"), Cause.STRIDE),
    ],
)
def test_a_node_that_differs_distinguishes_constant_branch_and_metadata(ours: Node, theirs: Node, cause: Cause) -> None:
    assert only(compiled(ours, reduce("%1")), compiled(theirs, reduce("%1"))).cause == cause


def test_a_constant_behind_a_guard_names_the_guard_on_both_sides() -> None:
    one = compiled(call("mul", "%0", "1"), reduce("%1"), guards=(guard(says="== 1"),))
    two = compiled(call("mul", "%0", "2"), reduce("%1"), guards=(guard(says="== 2"),))
    found = only(one, two)
    assert (found.cause, found.title) == (Cause.PYTHON_VALUE, "self.scale == 1 / 2")
    assert (found.guard[-4:], found.held[-4:]) == ("== 2", "== 1")


STATE = (
    '___check_global_state() against {"autocast_state":{"cached_enabled":true,"dtype":[15,5],"enabled":[%s,false]},%s}'
)
USUAL = '"default_dtype":6,"deterministic_algorithms":false,"grad_mode":true,"num_threads":1,"allow_tf32":false'


@pytest.mark.parametrize(
    ("changed", "cause", "title"),
    [
        (STATE % ("true", USUAL), Cause.AUTOCAST, "autocast cpu: off / on"),
        (STATE % ("false", USUAL.replace('mode":true', 'mode":false')), Cause.GRAD_MODE, "grad_mode: on / off"),
        (STATE % ("false", USUAL.replace(":6", ":7")), Cause.DEFAULT_DTYPE, "default_dtype: float32 / float64"),
        (STATE % ("false", USUAL.replace('threads":1', 'threads":2')), Cause.NUM_THREADS, "num_threads: 1 / 2"),
        (STATE % ("false", USUAL.replace('tf32":false', 'tf32":true')), Cause.ALLOW_TF32, "allow_tf32: off / on"),
        (STATE % ("false", USUAL.replace('algorithms":false', 'algorithms":true')),
         Cause.DETERMINISTIC, "deterministic_algorithms: off / on"),
    ],
)  # fmt: skip
def test_a_setting_of_the_process_is_the_headline_whatever_follows_from_it(
    changed: str, cause: Cause, title: str
) -> None:
    def under(state: str, value: str) -> CompileRecord:
        checked = guard("GLOBAL_STATE", "", "").model_copy(update={"expression": state, "line": None})
        return compiled(call("mul", "%0", "2", value=value), reduce("%1"), guards=(guard(), checked))

    found = only(under(STATE % ("false", USUAL), "f32[4, 8][8, 1]cpu"), under(changed, "bf16[4, 8][8, 1]cpu"))
    assert (found.cause, found.title, found.line) == (cause, title, line(3))


def test_a_guard_on_the_rank_itself_is_a_rank_dependent_branch() -> None:
    def on(rank: int) -> CompileRecord:
        ops = (call("torch.relu", "%0"),) if rank else ()
        return compiled(*ops, reduce(f"%{len(ops)}"), guards=(guard(source="G['RANK']", says=f"== {rank}"),))

    found = only(on(0), on(1))
    assert (found.cause, found.title) == (Cause.RANK_BRANCH, "RANK == 0 / 1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_on_one_rank_and_none_on_the_other_is_a_value_that_differs(rank: int) -> None:
    checked = "check_tensor(L['mask'], Tensor, DispatchKeySet(CPU), torch.float32, device=None, requires_grad=False)"
    given = Guard(type="TENSOR_MATCH", source="L['mask']", expression=checked, line=line(3))
    left_out = guard("NONE_MATCH", "L['mask']", "is None")
    masked = compiled(call("mul", "%0", "2"), call("add", "%1", "1"), reduce("%2"), guards=(given,))
    records = [compiled(guards=(left_out,))]
    records.insert(rank, masked)
    found = only(*records)
    assert found.cause == Cause.PYTHON_VALUE
    assert {group.item and group.item.fields["type"] for group in found.groups} == {"TENSOR_MATCH", "NONE_MATCH"}


@pytest.mark.parametrize(
    ("source", "cause"),
    [("list(dict.keys(L['self'].acts))[0]", Cause.DICT_ORDER), ("list(L['self'].acts)[0].name", Cause.SET_ORDER)],
)
def test_keys_in_a_different_order_are_a_cause_of_their_own(source: str, cause: Cause) -> None:
    def first(name: str, second: str) -> CompileRecord:
        places = [source, source.replace("[0]", "[1]")]
        says = [f"{place} == '{key}'" for place, key in zip(places, (name, second), strict=True)]
        guards = tuple(Guard(type="EQUALS_MATCH", source="", expression=text, line=line(3)) for text in says)
        return compiled(call(f"torch.{name}", "%0"), call(f"torch.{second}", "%1"), reduce("%2"), guards=guards)

    found = only(first("tanh", "relu"), first("relu", "tanh"))
    assert found.cause == cause and "'tanh' / 'relu'" in found.title


def test_a_set_that_is_iterated_in_a_different_order_is_told_from_a_branch() -> None:
    a_set = guard(source="L['self'].k", says="== {0, 8}")

    def runs(*names: str) -> CompileRecord:
        ops = [call(f"torch.{name}", f"%{index}") for index, name in enumerate(names)]
        return compiled(*ops, reduce("%2"), guards=(a_set,))

    assert only(runs("tanh", "relu"), runs("relu", "tanh")).cause == Cause.SET_ORDER
    assert only(runs("tanh", "relu"), runs("tanh", "cos")).cause == Cause.RANK_BRANCH


def test_the_same_ops_that_read_different_tensors_are_no_order_of_a_set() -> None:
    a_set = guard(source="L['self'].k", says="== {0, 8}")

    def reads(tensor_of: str) -> CompileRecord:
        ops = (call("torch.tanh", "%0"), call("torch.relu", "%0"), call("torch.cos", tensor_of))
        return compiled(*ops, reduce("%3"), guards=(a_set,))

    assert only(reads("%1"), reads("%2")).cause == Cause.RANK_BRANCH


def test_a_loop_over_a_set_is_named_where_it_calls_what_does_the_work() -> None:
    loop = line(30).model_copy(update={"function": "combine"})
    a_set = guard(source="L['losses']", says="== {'a', 'b'}").model_copy(update={"line": loop})

    def runs(*names: str, iterated: Guard = a_set) -> CompileRecord:
        ops = [call(f"torch.{name}", f"%{index}") for index, name in enumerate(names)]
        return compiled(*ops, reduce("%2"), guards=(iterated,))

    found = only(runs("tanh", "relu"), runs("relu", "tanh"))
    assert (found.cause, found.line) == (Cause.SET_ORDER, loop)
    elsewhere = a_set.model_copy(update={"line": line(30, "/app/other.py")})
    away = only(runs("tanh", "relu", iterated=elsewhere), runs("relu", "tanh", iterated=elsewhere))
    assert away.cause == Cause.RANK_BRANCH


def test_a_value_that_makes_one_rank_run_the_forward_again_is_the_finding() -> None:
    def recomputes(value: bool, *phases: str) -> CompileRecord:
        ops = (call("checkpoint", "%0"),) if value else ()
        asked = guard(source="L['self'].recompute", says=f"== {value}")
        collectives = tuple(collective(phase=phase) for phase in phases)
        return compiled(*ops, reduce(f"%{len(ops)}"), guards=(asked,), collectives=collectives)

    found = only(recomputes(False, "forward"), recomputes(True, "forward", "backward"))
    assert (found.cause, found.cls) == (Cause.PYTHON_VALUE, DivergenceClass.COLLECTIVES)
    assert (found.held[-5:], found.guard[-4:]) == ("False", "True")
    extra = only(recomputes(False, "forward"), recomputes(True, "forward", "forward"))
    assert extra.cause == Cause.EXTRA_COLLECTIVE


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (("L['x']", "L['y']"), Cause.ALIAS),
        (("L['m']._modules['a']._parameters['w']", "L['m']._modules['b']._parameters['w']"), Cause.TIED_WEIGHTS),
    ],
)
def test_one_tensor_for_two_names_is_a_cause_of_its_own(names: tuple[str, str], cause: Cause) -> None:
    same = Guard(type="LAMBDA_GUARD", source="", expression=" is ".join(names), line=line(3))
    two = compiled(inputs=tuple(map(tensor, names)))
    found = only(two, compiled(inputs=(tensor(names[0]),), guards=(guard(), same)))
    assert (found.cause, found.groups[-1].ranks) == (cause, (1,))


def test_a_frozen_parameter_is_named() -> None:
    weight = "L['self']._modules['head']._parameters['weight']"
    found = only(compiled(inputs=(tensor(weight, requires_grad=True),)), compiled(inputs=(tensor(weight),)))
    assert (found.cause, "self.head.weight" in found.title) == (Cause.FROZEN_PARAMETER, True)


def test_a_backend_that_lowers_less_is_named_unless_a_cache_was_hit() -> None:
    whole = lowered(call("torch.ops.aten.mul.Tensor", "%0", "2"))
    found = only(whole, compiled())
    assert (found.cause, found.culprits) == (Cause.BACKEND, ())
    assert between(whole, compiled(cache=("aotautograd_cache_hit",))) == ()


def test_the_whole_on_one_rank_and_its_parts_on_a_different_rank_are_one_finding() -> None:
    layer, model = line(10), line(30)
    parts = [compiled(call("mul", "%0", "2", at=12), compile_id=f"{n}/0", line=layer) for n in range(2)]
    whole = compiled(call("mul", "%0", "2", at=12), call("mul", "%1", "2", at=12), line=model)
    assert only(whole, parts).cause == Cause.REGIONAL_COMPILE


def test_a_constant_without_a_guard_names_none() -> None:
    found = only(compiled(call("mul", "%0", "1"), reduce("%1")), compiled(call("mul", "%0", "2"), reduce("%1")))
    assert (found.cause, found.guard, found.held) == (Cause.RANK_CONSTANT, "", "")


def test_break_and_failure_blame_the_rank_that_has_them() -> None:
    for change, cause in (({"breaks": (broken(),)}, Cause.GRAPH_BREAK), ({"failure": "boom"}, Cause.COMPILE_FAILED)):
        found = only(compiled(**change), compiled())
        assert (found.cause, found.groups[-1].ranks) == (cause, (0,))
        assert all(group.line for group in found.groups)
    at = between(compiled(), compiled(failure="Unsupported", failure_line=line(77)))[0].line
    assert at is not None and at.line == 77


@pytest.mark.parametrize(
    ("change", "cause", "title"),
    [
        ({"inputs": (tensor(dtype="bfloat16"),)}, Cause.DTYPE, "x: dtype float32 / bfloat16; "),
        ({"graphs": (graph(call("mul", "%0", "9"), reduce("%1")),)}, Cause.RANK_CONSTANT, "mul(%0, 2) / mul(%0, 9); "),
        ({"guards": ()}, Cause.COMPILE_FAILED, ""),
    ],
    ids=["input", "constant", "same program"],
)
def test_a_program_that_the_backend_failed_to_compile_is_named_by_what_differs_in_it_and_by_the_error(
    change: dict[str, object], cause: Cause, title: str
) -> None:
    """Collectives and guards of that rank are missing: neither is the cause."""
    found = only(compiled(), compiled(**({"collectives": (), "failure": "RecursionError"} | change)))
    assert (found.cause, found.groups[-1].ranks) == (cause, (1,))
    assert found.title.startswith(title) and "RecursionError" in found.title


def test_a_trace_that_failed_explains_the_inputs_and_nodes_that_it_did_not_reach() -> None:
    cut = compiled(graphs=(), guards=(), collectives=(), inputs=(tensor(dtype="bfloat16"),), failure="Unsupported")
    assert only(cut, compiled()).cause == Cause.COMPILE_FAILED


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_that_is_the_recompile_limit_is_named_on_the_rank_that_reached_it(rank: int) -> None:
    ranks = [compiled(), compiled()]
    ranks[rank] = compiled(failure="Dynamo recompile limit exceeded (8)")
    found = only(*ranks)
    assert (found.cause, found.groups[-1].ranks) == (Cause.RECOMPILE_LIMIT, (rank,))


def test_what_follows_a_graph_break_is_not_a_second_finding() -> None:
    resumed = compiled(function="torch_dynamo_resume_in_forward_at_4", compile_id="1/0")
    assert only([compiled(breaks=(broken(),)), resumed], compiled()).cause == Cause.GRAPH_BREAK


KEYS = "check_tensor(L['x'], Tensor, DispatchKeySet({}), torch.float32, requires_grad={}, size=[4], stride=[1])"
ANY_SIZE = KEYS.format("CPU", False).replace("size=[4]", "size=[None]")


@pytest.mark.parametrize(
    ("type_", "ours", "theirs", "cause"),
    [
        ("EQUALS_MATCH", "== 1", "== 2", Cause.GUARD_ONLY),
        ("TENSOR_MATCH", KEYS.format("CPU, AutogradCPU", False), KEYS.format("CPU", False), Cause.DISPATCH_KEY),
        ("TENSOR_MATCH", KEYS.format("CPU", False), KEYS.format("CPU", True), Cause.REQUIRES_GRAD),
        ("TENSOR_MATCH", KEYS.format("CPU", False), ANY_SIZE, Cause.AUTOMATIC_DYNAMIC),
        ("TYPE_MATCH", "<class 'torch.Tensor'>", "<class 'AsyncCollectiveTensor'>", Cause.TENSOR_SUBCLASS),
    ],
)
def test_a_guard_that_differs_under_equal_graphs(type_: str, ours: str, theirs: str, cause: Cause) -> None:
    one, two = (compiled(guards=(guard(type_, "L['x']", says),)) for says in (ours, theirs))
    found = only(one, two)
    assert (found.cause, found.cls) == (cause, DivergenceClass.CONTENT)
    assert ours in found.held and theirs in found.guard


def test_a_different_number_of_saved_tensors_is_the_partitioner() -> None:
    def saves(*outputs: str) -> CompileRecord:
        found = graph(call("torch.ops.aten.mul.Tensor", "%0", "2"), kind="forward")
        out = found.nodes[-1].model_copy(update={"args": (f"({', '.join(outputs)},)",)})
        dynamo = graph(call("mul", "%0", "2"), reduce("%1"))
        return compiled(graphs=(dynamo, found.model_copy(update={"nodes": (*found.nodes[:-1], out)})))

    assert only(saves("%1"), saves("%1", "%0")).cause == Cause.PARTITIONER


def test_a_different_lowered_op_is_a_compiler_pass() -> None:
    ops = [lowered(call(f"torch.ops.aten.{name}.default", "%0")) for name in ("relu", "gelu")]
    assert only(*ops).cause == Cause.COMPILER_PASS


def test_a_different_matmul_in_the_generated_code_is_autotuning() -> None:
    codes = ("extern_kernels.mm(buf0, buf1, out=buf2)", "triton_tem_fused_mm_0.run(buf0, buf1, buf2)")
    assert only(*(lowered(kernels=(kernel(code, name="call"),)) for code in codes)).cause == Cause.AUTOTUNE


def test_a_different_matmul_anywhere_in_the_differing_code_is_autotuning() -> None:
    first = [kernel(code, name="cpp_fused_0") for code in ("tmp0 = x + 1", "tmp0 = 1 + x")]
    calls = [
        kernel(code, name="call") for code in ("extern_kernels.bmm(a, b, out=c)", "triton_tem_fused_bmm.run(a, b)")
    ]
    assert only(*(lowered(kernels=pair) for pair in zip(first, calls, strict=True))).cause == Cause.AUTOTUNE


def test_a_matmul_that_all_ranks_have_is_no_choice() -> None:
    equal = kernel("extern_kernels.bmm(a, b, out=c)", name="call")
    codes = ("tmp0 = x + 1", "tmp0 = 1 + x")
    assert only(*(lowered(kernels=(kernel(code), equal)) for code in codes)).cause == Cause.COMPILER_PASS


def test_generated_code_that_swaps_collectives_is_a_hang_by_a_compiler_pass() -> None:
    calls = [f"{FUNCTIONAL}all_reduce_.default(buf{n}, '{op}', 'group:tp')" for n, op in enumerate(("sum", "max"))]
    found = only(*(lowered(kernels=(kernel("\n".join(c), name="call"),)) for c in (calls, calls[::-1])))
    assert (found.cause, found.cls) == (Cause.COMPILER_PASS, DivergenceClass.COLLECTIVES)


def test_a_branch_of_the_same_op_on_a_different_line_is_a_branch() -> None:
    def branched(value: int, at: int) -> CompileRecord:
        return compiled(call("sub", "%0", str(value), at=at), reduce("%1"), guards=(guard(says=f"== {value}"),))

    assert only(branched(0, 37), branched(1, 37)).cause == Cause.RANK_CONSTANT
    assert only(branched(0, 37), branched(1, 39)).cause == Cause.RANK_BRANCH


def test_a_cache_that_one_rank_hits_is_information() -> None:
    found = only(compiled(cache=("fx_graph_cache_hit",)), compiled(cache=("fx_graph_cache_miss",)))
    assert (found.cause, found.cls, found.is_red) == (Cause.CACHE_SPLIT, DivergenceClass.LABEL, False)


def test_a_guard_without_a_request_stands_at_the_first_node_that_differs() -> None:
    def scaled(value: int) -> CompileRecord:
        unplaced = guard(says=f"== {value}").model_copy(update={"line": None})
        return compiled(call("mul", "%0", str(value), at=37), reduce("%1"), guards=(unplaced,))

    assert only(scaled(5), scaled(6)).line == line(37)


def test_two_ranks_have_no_majority_and_three_have() -> None:
    def scaled(value: int) -> CompileRecord:
        return compiled(call("mul", "%0", str(value)), reduce("%1"))

    assert only(scaled(5), scaled(6)).culprits == ()
    assert only(scaled(5), scaled(6), scaled(5)).culprits == (1,)
    assert only(compiled(), compiled(breaks=(broken(),))).culprits == (1,)


def test_behind_a_branch_the_first_of_the_lines_is_nearest_to_what_was_asked() -> None:
    def asks(value: int, *calls: Node) -> CompileRecord:
        return compiled(*calls, reduce("%1"), guards=(guard(says=f"== {value}").model_copy(update={"line": None}),))

    found = only(asks(0, call("mul", "%0", "2", at=34)), asks(1, call("torch.relu", "%0", at=35)))
    assert {group.line for group in found.groups} == {line(34)}


def test_what_a_module_is_fed_stands_where_it_is_called() -> None:
    caller = line(50, "/app/train.py")
    torch_call = line(1789, "/v/lib/python3.11/site-packages/torch/nn/modules/module.py")
    stack = (caller, torch_call, line(3))
    found = only(compiled(stack=stack), compiled(stack=stack, inputs=(tensor(shape="[4, 9]", stride="[9, 1]"),)))
    assert (found.cause, found.line) == (Cause.SHAPE, caller)


def test_an_error_has_the_message_of_the_operator() -> None:
    text = "RuntimeError when making fake tensor call\n  Explanation: linear(*(x,)): got RuntimeError('no [2] X [3]')"
    error = normalise.error(text)
    assert error.startswith("RuntimeError ") and error.endswith(": no [2] X [3]")


def _of_size(size: int, *, is_open: bool, **fields: object) -> CompileRecord:
    sizes = "None, 8" if is_open else f"{size}, 8"
    match = f"check_tensor(L['x'], Tensor, DispatchKeySet(CPU), torch.float32, size=[{sizes}], stride=[8, 1])"
    guards = (guard("TENSOR_MATCH", "L['x']", match),)
    return compiled(inputs=(tensor(shape=f"[{size}, 8]"),), guards=guards, **fields)


def test_a_size_that_the_code_leaves_open_is_each_ranks_own_where_it_issues_no_collective() -> None:
    """Tokens of an expert, `dynamic=True`: what is compiled is equal."""
    alone = {"graphs": (graph(call("mul", "%0", "2")),), "collectives": ()}
    assert between(_of_size(4, is_open=True, **alone), _of_size(7, is_open=True, **alone)) == ()
    assert only(_of_size(4, is_open=False, **alone), _of_size(7, is_open=False, **alone)).cause == Cause.SHAPE
    assert only(_of_size(4, is_open=True), _of_size(7, is_open=True)).cause == Cause.SHAPE
