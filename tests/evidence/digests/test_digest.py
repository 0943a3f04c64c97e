"""Equal programs have equal digests whatever is incidental; every change that counts changes them."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evidence import programs, samples
from tests.evidence.programs import GuardLine, Noise, Op, Program
from tpcompile.evidence.digests.digest import digest_rank, layer_items
from tpcompile.evidence.records import Collective, CompileRecord, Item, Layer, RankRecord


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_equal_programs_have_equal_digests_whatever_names_ids_paths_and_order(data):
    program = data.draw(programs.programs())
    one, two = data.draw(programs.noises), data.draw(programs.noises)
    assert programs.content(program, one) == programs.content(program, two)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_change_that_counts_changes_the_digest(data):
    program = data.draw(programs.programs())
    other = data.draw(programs.mutations(program))
    one, two = data.draw(programs.noises), data.draw(programs.noises)
    assert programs.content(program, one) != programs.content(other, two)


@given(st.permutations(["all_reduce(sum)", "all_gather", "reduce_scatter(sum)"]))
@settings(deadline=None)
def test_the_order_of_collectives_is_in_the_digest(order):
    def sha(ops):
        collectives = tuple(Collective(phase="backward", op=op, group="tp") for op in ops)
        graph = programs.record(_program(), Noise(0)).compiles[0].graphs
        compile_ = CompileRecord(compile_id="0/0", graphs=graph, collectives=collectives)
        return digest_rank(RankRecord(rank=0, world_size=1, compiles=(compile_,))).compiles[0].sha(Layer.COLLECTIVES)

    straight = ["all_reduce(sum)", "all_gather", "reduce_scatter(sum)"]
    assert (sha(order) == sha(straight)) == (order == straight)


def test_a_large_number_of_the_user_is_not_mistaken_for_an_object_id():
    one = _program(guard=GuardLine("EQUALS_MATCH", "G['seed']", "G['seed'] == 140238573782336"))
    two = _program(guard=GuardLine("EQUALS_MATCH", "G['seed']", "G['seed'] == 140238573782337"))
    assert programs.content(one, Noise(1)) != programs.content(two, Noise(1))


def test_environment_is_part_of_the_digest():
    record = programs.record(_program(), Noise(0))
    other = record.model_copy(update={"environment": (("torch", "2.12.0"),)})
    assert digest_rank(record).environment != digest_rank(other).environment


def test_temporary_names_and_user_lines_are_not_in_the_digest():
    record = programs.record(_program(), Noise(0))
    graph = record.compiles[0].graphs[0]
    bare = graph.model_copy(
        update={"nodes": tuple(n.model_copy(update={"name": "other", "line": None}) for n in graph.nodes)}
    )
    compile_ = record.compiles[0].model_copy(update={"graphs": (bare,)})
    assert digest_rank(record).compiles == digest_rank(record.model_copy(update={"compiles": (compile_,)})).compiles


def test_a_layer_that_no_rank_logged_is_not_observed_rather_than_empty():
    digest = programs.digest(_program(), Noise(0)).compiles[0]
    assert digest.sha(Layer.KERNELS, "forward") is None
    assert digest.sha(Layer.GRAPH) is not None


def test_a_guard_on_a_line_of_torch_has_no_line_and_one_on_a_users_line_keeps_it():
    mine, library = samples.guard(), samples.guard("TRUE_MATCH", "G['flag']", "is True")
    of_torch = samples.line(9, file="/venv/lib/site-packages/torch/nn/functional.py")
    compile_ = samples.compiled(guards=(mine, library.model_copy(update={"line": of_torch})))
    lines = {item.text.partition(" :: ")[0]: item.line for item in layer_items(compile_, Layer.GUARDS)}
    assert lines == {mine.source: mine.line, library.source: None}


def _program(guard: GuardLine | None = None) -> Program:
    guards = (guard,) if guard else ()
    ops = (Op("torch.relu", (0,)), Op("torch.ops._c10d_functional.all_reduce", (1, "'sum'"), group="tp"))
    return replace(Program(1, ops, guards))


def test_an_item_that_travelled_says_the_same() -> None:
    for layer in (Layer.INPUTS, Layer.GRAPH, Layer.GUARDS, Layer.COLLECTIVES):
        for item in layer_items(samples.compiled(), layer):
            assert Item.model_validate_json(item.to_json()).key == item.key


def test_a_frame_of_torch_without_an_op_is_no_break() -> None:
    """Guards of a DTensor parameter read `DTensor.device_mesh`, which Dynamo compiles, too: one frame more."""

    def frames(file: str, **fields: object) -> int:
        stack = (samples.line(5), samples.line(779, file=file))
        empty = samples.compiled(**{"compile_id": "1/0", "graphs": (), "stack": stack, **fields})
        one = samples.record(0, samples.compiled(), empty, counters=(samples.counters(frames=2),))
        return digest_rank(one).counters[0].frames

    torchs, users = "/venv/lib/python3.11/site-packages/torch/distributed/tensor/_api.py", "/home/me/model.py"
    assert (frames(torchs), frames(users)) == (1, 2)
    assert frames(torchs, failure="it was skipped") == 2
    assert frames(torchs, graphs=(samples.graph(samples.reduce("%1")),)) == 2
