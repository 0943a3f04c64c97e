"""Recorded TORCH_TRACE files of torch 2.11 and 2.13, two ranks each -> the right conclusion, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evidence.samples import divergences, record
from tests.traces import read_trace_file
from tpcompile.evidence.compiles.trace import compile_records
from tpcompile.evidence.records import DivergenceClass, Layer, RankRecord

TRACES = Path(__file__).parent.parent.parent / "data" / "traces"
VERSIONS = ["2.11.0", "2.13.0"]

pytestmark = pytest.mark.parametrize("version", VERSIONS)


def ranks(version: str, program: str) -> list[RankRecord]:
    """Both ranks of a recorded program."""
    folder = TRACES / f"torch-{version}"
    found = []
    for rank in range(2):
        events = read_trace_file(folder / f"{program}_rank_{rank}.log")
        found.append(record(rank, *compile_records(events, roles={"0": "tp"})))
    return found


def test_the_healthy_program_has_no_divergence(version: str) -> None:
    assert divergences(*ranks(version, "healthy")) == ()


def test_every_layer_of_the_program_is_read(version: str) -> None:
    (compile_,) = ranks(version, "healthy")[0].compiles
    assert (compile_.function, compile_.line and compile_.line.file) == ("forward", "/app/tests/data/record_traces.py")
    assert [g.kind for g in compile_.graphs] == ["dynamo", "forward", "backward"]
    assert [i.source for i in compile_.inputs] == [
        "L['self']._buffers['start']", "L['self']._parameters['weight']", "L['tokens']",
    ]  # fmt: skip
    assert len(compile_.guards) > 40 and {k.phase for k in compile_.kernels} == {"forward", "backward"}
    assert [(c.phase, c.op, c.reduce_op, c.dtype, c.shape, c.group) for c in compile_.collectives] == [
        ("forward", "all_reduce", "sum", "f32", "[6, 4]", "tp")
    ]
    assert compile_.cache.count("fx_graph_cache_miss") == 2


def test_the_line_of_a_collective_is_the_users_not_the_wrappers(version: str) -> None:
    (collective,) = ranks(version, "healthy")[0].compiles[0].collectives
    assert collective.line is not None and collective.line.file == "/app/tests/data/record_traces.py"


def test_no_graph_text_falls_back_to_unparsed_lines(version: str) -> None:
    for found in ranks(version, "healthy"):
        assert not [n for c in found.compiles for g in c.graphs for n in g.nodes if n.target == "unparsed"]


def test_no_id_or_address_is_left_in_any_guard(version: str) -> None:
    guards = [g.expression for found in ranks(version, "healthy") for g in found.compiles[0].guards]
    assert not [g for g in guards if "0x" in g or any(part.isdigit() and len(part) > 9 for part in g.split("_"))]


def test_the_rank_constant_is_found_with_both_values_and_its_line(version: str) -> None:
    (found,) = divergences(*ranks(version, "rank_constant"))
    assert (found.layer, found.cls) == (Layer.GUARDS, DivergenceClass.CONTENT)
    assert found.title == "self.scale == 0.5 / 1.0"
    assert {g.item.line.code for g in found.groups if g.item and g.item.line} == {"return y * self.scale"}
    assert set(found.consequences) == {Layer.GRAPH, Layer.LOWERED, Layer.KERNELS}


def test_the_files_are_small_and_know_no_machine(version: str) -> None:
    for path in (TRACES / f"torch-{version}").iterdir():
        text = path.read_text()
        assert len(text) < 60_000
        assert not [word for word in ("/root", "/home", ".venv", str(TRACES.parent.parent.parent)) if word in text]
