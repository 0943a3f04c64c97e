"""Live compiles on two gloo ranks -> records: healthy DTensor stays green, every control is found."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.evidence.samples import divergences
from tests.recording import programs
from tests.traces import read_trace_file
from tpcompile.collectives import all_reduce
from tpcompile.evidence.compiles.trace import compile_records
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import CompileRecord, Divergence, DivergenceClass, Layer, RankRecord
from tpcompile.evidence.records.causes import Cause
from tpcompile.recording import CaptureSession
from tpcompile.testing import run_on_ranks


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder the ranks write TORCH_TRACE files to; torch reads the variable when it is imported."""
    folder = tmp_path_factory.mktemp("trace")
    before = os.environ.get("TORCH_TRACE")
    os.environ["TORCH_TRACE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TORCH_TRACE"]
    else:
        os.environ["TORCH_TRACE"] = before


@pytest.fixture(scope="module")
def language(trace_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[RankRecord]:
    """The DTensor model under cold, warm and split caches."""
    return run_on_ranks(programs.cold_warm_split, str(tmp_path_factory.mktemp("caches")), timeout_s=280)


@pytest.fixture(scope="module")
def controls() -> list[dict[str, RankRecord]]:
    """Every negative control, in one pair of processes."""
    return run_on_ranks(programs.controls)


def in_phase(record: RankRecord, phase: str) -> RankRecord:
    """The compiles of one phase only."""
    return record.model_copy(update={"compiles": tuple(c for c in record.compiles if c.phase == phase)})


def layers(record: RankRecord, phase: str) -> list[dict[tuple[Layer, str], str]]:
    """Hashes of every observed layer of every compile in a phase."""
    found = digest_rank(in_phase(record, phase)).compiles
    return [{(layer.layer, layer.part): layer.sha256 for layer in c.layers} for c in found]


@pytest.mark.parametrize("phase", programs.PHASES)
def test_a_sharded_model_is_green_with_cold_warm_and_split_caches(language: list[RankRecord], phase: str) -> None:
    found = divergences(*(in_phase(r, phase) for r in language))
    split = [(Layer.KERNELS, DivergenceClass.LABEL)] if phase == "split" else []  # information: hit here, miss there
    assert [(d.layer, d.cls) for d in found] == [(Layer.LOWERED, DivergenceClass.RANK_PARAMETRIC), *split]
    first = [group.item.text for group in found[0].groups if group.item]
    assert "aten.lt.Scalar" in first[0] and ", 0)" in first[0] and ", 32)" in first[1]


@pytest.mark.parametrize("phase", ["warm", "split"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_cache_hit_has_the_digest_of_a_miss(language: list[RankRecord], phase: str, rank: int) -> None:
    assert layers(language[rank], phase) == layers(language[rank], "cold")


@pytest.mark.parametrize("phase", programs.PHASES)
def test_every_layer_is_observed_hit_or_miss(language: list[RankRecord], phase: str) -> None:
    both = [(layer, part) for layer in (Layer.LOWERED, Layer.KERNELS) for part in ("forward", "backward")]
    expected = {(layer, "") for layer in (Layer.INPUTS, Layer.GRAPH, Layer.GUARDS, Layer.COLLECTIVES)} | set(both)
    assert [set(c) for r in language for c in layers(r, phase)] == [expected, expected]


def test_the_caches_really_were_cold_warm_and_split(language: list[RankRecord]) -> None:
    def outcome(rank: int, phase: str) -> set[str]:
        (compile_,) = in_phase(language[rank], phase).compiles
        forward = next(c for c in compile_.cache if c.startswith("fx_graph_cache"))
        return {forward.removeprefix("fx_graph_cache_")}

    assert [outcome(rank, phase) for phase in programs.PHASES for rank in (0, 1)] == [
        {"miss"}, {"miss"}, {"hit"}, {"hit"}, {"hit"}, {"miss"},
    ]  # fmt: skip


def test_collectives_of_forward_and_backward_are_captured_by_role(language: list[RankRecord]) -> None:
    (compile_,) = in_phase(language[0], "warm").compiles
    assert [(c.phase, c.op, c.reduce_op, c.group) for c in compile_.collectives] == [
        ("forward", "all_reduce", "sum", "tp"), ("forward", "all_reduce", "sum", "tp"),
        ("backward", "all_reduce", "sum", "tp"),
    ]  # fmt: skip


def test_a_trace_file_of_the_process_gives_the_records_of_the_session(
    language: list[RankRecord], trace_folder: Path
) -> None:
    for rank, record in enumerate(language):
        (path,) = trace_folder.glob(f"*_rank_{rank}_*")
        lacks = {"phase": "", "rank_reads": None, "called_from": (), "traced_from": ()}
        live = tuple(c.model_copy(update=lacks) for c in record.compiles)
        assert compile_records(read_trace_file(path), roles=dict(record.groups)) == live


def between(controls: list[dict[str, RankRecord]], name: str) -> Divergence:
    """The one divergence of a control."""
    found = divergences(*(ranks[name] for ranks in controls))
    assert len(found) == 1, [d.title for d in found]
    return found[0]


def lines(found: Divergence) -> set[str]:
    """Code on the lines that are blamed."""
    files = {group.item.line.file for group in found.groups if group.item and group.item.line}
    assert files == {programs.__file__}
    return {group.item.line.code for group in found.groups if group.item and group.item.line}


def test_equal_programs_on_all_ranks_have_no_divergence(controls: list[dict[str, RankRecord]]) -> None:
    assert divergences(*(ranks["healthy"] for ranks in controls)) == ()


def test_a_flag_that_changes_no_graph_is_found_in_the_guards(controls: list[dict[str, RankRecord]]) -> None:
    found = between(controls, "flag")
    assert (found.layer, found.cls) == (Layer.GUARDS, DivergenceClass.CONTENT)
    texts = [group.item.text.partition(" :: ")[2] for group in found.groups if group.item]
    assert [text.partition(":")[0] for text in texts] == ["TRUE_MATCH", "FALSE_MATCH"]
    (line,) = lines(found)
    assert line.startswith("if self.flag:")


@pytest.mark.parametrize(
    ("name", "layer", "says", "code"),
    [
        ("attribute", Layer.GUARDS, "self.scale == 3 / 4", "y = y * self.scale"),
        ("get_rank", Layer.GRAPH, ", 1) / mul(", "y = y * (dist.get_rank() + 1)"),
    ],
)
def test_a_rank_constant_is_found_in_the_guard_if_there_is_one_and_else_in_the_graph(
    controls: list[dict[str, RankRecord]], name: str, layer: Layer, says: str, code: str
) -> None:
    found = between(controls, name)
    assert (found.layer, found.cls) == (layer, DivergenceClass.CONTENT)
    assert says in found.title
    assert lines(found) == {code}


def test_a_different_reduce_op_is_a_hang(controls: list[dict[str, RankRecord]]) -> None:
    found = between(controls, "reduce_op")
    assert found.cls == DivergenceClass.COLLECTIVES
    ops = [group.item.fields["reduce_op"] for group in found.groups if group.item]
    assert (found.cause, ops) == (Cause.REDUCE_OP, ["sum", "max"])


def test_a_different_stride_is_found_at_the_inputs(controls: list[dict[str, RankRecord]]) -> None:
    found = between(controls, "stride")
    assert (found.layer, found.title) == (Layer.INPUTS, "x: stride [8, 1] / [1, 4]")


def test_an_extra_compile_is_named_on_the_rank_that_has_it(controls: list[dict[str, RankRecord]]) -> None:
    found = between(controls, "extra")
    assert (found.cause, [group.ranks for group in found.groups if group.item]) == (Cause.EXTRA_COMPILE, [(1,)])
    assert "double" in found.where
    assert lines(found) == {"return x * 2 + 1"}


def test_the_same_graphs_in_the_opposite_order_are_information(controls: list[dict[str, RankRecord]]) -> None:
    assert between(controls, "opposite_order").cls == DivergenceClass.LABEL


def run(function, x: torch.Tensor) -> torch.Tensor:
    """Compile without a backend's work, and call."""
    return torch.compile(function, backend="eager")(x)


@pytest.mark.usefixtures("fresh_compiler")
def test_phases_hold_their_own_compiles_and_counters() -> None:
    with CaptureSession() as session:
        with session.phase("first"):
            run(programs.double, torch.ones(3))
            session.count_call()
        with session.phase("steady"):
            run(programs.double, torch.ones(3))
            session.count_call()
        with session.phase("other type"):
            run(programs.double, torch.ones(3, dtype=torch.int64))
    record = session.record(rank=0, world_size=1)
    assert [(c.phase, c.compile_id) for c in record.compiles] == [("first", "0/0"), ("other type", "0/1")]
    assert [(c.phase, c.calls, c.frames, c.graphs, c.recompiles) for c in record.counters] == [
        ("first", 1, 1, 1, 0), ("steady", 1, 0, 0, 0), ("other type", 0, 1, 1, 1),
    ]  # fmt: skip
    assert "dtype" in record.compiles[1].recompile_reasons[0]


@pytest.mark.usefixtures("fresh_compiler")
def test_nothing_is_recorded_before_and_after_the_session() -> None:
    run(programs.double, torch.ones(3))
    with CaptureSession() as session:
        pass
    run(programs.cosine, torch.ones(3))
    assert session.compiles() == ()


@pytest.mark.usefixtures("fresh_compiler")
def test_two_sessions_at_once_see_the_same() -> None:
    with CaptureSession() as outer, CaptureSession() as inner:
        run(programs.double, torch.ones(3))
    assert outer.compiles() == inner.compiles() != ()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_session_that_starts_late_still_knows_file_names() -> None:
    with CaptureSession():
        run(programs.double, torch.ones(3))
    torch.compiler.reset()
    with CaptureSession() as late:
        run(programs.double, torch.ones(3))
    assert late.compiles()[0].line is not None and late.compiles()[0].line.file == programs.__file__


@pytest.mark.usefixtures("fresh_compiler")
def test_the_record_arrives_after_the_compile_and_before_its_code_runs() -> None:
    seen: list[CompileRecord] = []

    def stop(record: CompileRecord) -> None:
        seen.append(record)
        raise RuntimeError("stopped")

    x = torch.ones(3)
    with CaptureSession(on_compile=stop), pytest.raises(RuntimeError, match="stopped"):
        torch.compile(lambda t: t.add_(1), backend="eager")(x)
    assert x.tolist() == [1, 1, 1]
    assert [len(record.graphs) for record in seen] == [1]


@pytest.mark.usefixtures("fresh_compiler")
def test_an_exception_of_a_callback_leaves_the_compiler_usable() -> None:
    stops: list[CompileRecord] = []

    def stop_once(record: CompileRecord) -> None:
        stops.append(record)
        if len(stops) == 1:
            raise RuntimeError("stopped")

    with CaptureSession(on_compile=stop_once) as session:
        with pytest.raises(RuntimeError, match="stopped"):
            run(programs.double, torch.ones(3))
        session.reset_compiler()
        run(programs.double, torch.ones(3))
    assert len(stops) == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_callbacks_survive_a_reset_through_the_session() -> None:
    started: list[str] = []
    with CaptureSession(on_compile_start=started.append) as session:
        run(programs.double, torch.ones(3))
        session.reset_compiler()
        run(programs.double, torch.ones(3))
    assert len(started) == 2 and len(session.compiles()) == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_break_is_recorded_with_its_line_and_counted() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    with CaptureSession() as session, session.phase("first"):
        run(breaks, torch.ones(3))
    record = session.record(rank=0, world_size=1)
    (found,) = [b for c in record.compiles for b in c.breaks]
    assert found.line is not None and "graph_break()" in found.line.code
    assert (record.counters[0].breaks, record.counters[0].graphs) == (1, 2)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compile_that_fails_is_recorded_with_its_reason() -> None:
    def backend(*_: object) -> None:
        raise ValueError("kernelless")

    with CaptureSession() as session, pytest.raises(Exception, match="kernelless"):
        torch.compile(programs.double, backend=backend)(torch.ones(3))
    assert "kernelless" in session.compiles()[0].failure


@pytest.mark.usefixtures("fresh_compiler")
def test_tracing_that_fails_is_recorded_with_its_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return wrong(x + 1)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 5)  # three numbers

    with CaptureSession() as session, pytest.raises(Exception, match="shape"):
        torch.compile(step, backend="eager")(torch.ones(3))
    found = session.compiles()[0].failure_line
    assert found is not None and "three numbers" in linecache.getline(found.file, found.line)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_tensor_written_into_a_slice_changes_the_digest() -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0] = x[1]
        return y + 1

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        x[1]
        return y + 1

    texts = []
    for function in (written, plain):
        with CaptureSession() as session:
            run(function, torch.ones(3))
        texts.append([n.target for n in session.compiles()[0].graphs[0].nodes])
    assert "setitem" in texts[0] and "setitem" not in texts[1]


@pytest.mark.usefixtures("fresh_compiler")
def test_the_environment_names_what_decides_about_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/of-this-rank")
    with CaptureSession() as session:
        pass
    found = dict(session.record(rank=0, world_size=1).environment)
    assert found["torch"] == torch.__version__ and found["env TORCHINDUCTOR_MAX_AUTOTUNE"] == "1"
    assert "env TORCHINDUCTOR_CACHE_DIR" not in found


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """Rank 0 of two; no process runs rank 1."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fresh_compiler", "one_of_two")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_a_collective_has_the_line_of_its_call(whose: str, backend: str) -> None:
    def reduces(x: torch.Tensor) -> torch.Tensor:
        y, group = x * 2, dist.group.WORLD
        if whose == "ours":
            return all_reduce(y, group=group)
        return funcol.all_reduce(y, "sum", group)

    with CaptureSession() as session:
        torch.compile(reduces, backend=backend)(torch.ones(3))
    (found,) = session.compiles()[0].collectives
    assert found.line is not None and found.line.file == __file__
    assert found.line.code.startswith("return all_reduce(" if whose == "ours" else "return funcol.all_reduce(")


def test_a_compile_belongs_to_the_step_that_was_set() -> None:
    torch.compiler.reset()
    compiled = torch.compile(torch.relu, backend="eager")
    with CaptureSession() as session:
        compiled(torch.ones(2))
        session.step = 5
        compiled(torch.ones(3))
    assert [c.step for c in session.compiles()] == [None, 5]
