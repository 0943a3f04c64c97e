"""Logs whose records contradict each other, or the logs of other ranks -> damage that is named, and no difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.logs.damage import records, rehashed
from tests.evidence.logs.test_damage import edit, job, shown
from tests.evidence.logs.test_diagnose import JOBS, LOG
from tpcompile.evidence.compiles.contradictions import Flaw
from tpcompile.evidence.logs.ends import Lack

__all__ = ["job"]  # a fixture


def without_all(text: str, *events: str, of: str = "") -> str:
    """A log without any record of these events of a compile."""
    found = [record.decode() for record in records(text.encode())]
    lines = [record.partition("\n")[0] for record in found]
    lost = [any(f'{{"{event}"' in line for event in events) and of in line for line in lines]
    return "".join(record for record, is_lost in zip(found, lost, strict=True) if not is_lost)


OF_FIRST = '"frame_id": 0, "frame_compile_id": 0, "attempt"'
LOST_TOGETHER = [
    ("training", ("aot_forward_graph", "aot_backward_graph"), {Flaw.NO_BACKWARD, Flaw.NO_LOWERED}),
    ("training", ("dynamo_output_graph", "compilation_metrics"), {Flaw.NO_END, Flaw.NO_GRAPH}),
    ("training", ("dynamo_graph_break_reason", "compilation_metrics"), {Flaw.NO_END}),
    ("training", ("dynamo_start", "describe_source", "compilation_metrics"), {Flaw.FIRST_RECORD, Flaw.NO_END}),
    ("cold_shared", ("dynamo_output_graph", "aot_inference_graph"), {Flaw.NO_GRAPH}),
    ("warm_cold", ("dynamo_output_graph", "aot_inference_graph", "inductor_output_code"), {Flaw.NO_GRAPH}),
    ("cold_shared", ("aot_inference_graph",), {Flaw.FEWER_THAN_PEERS}),
    ("cold_shared", ("dynamo_output_graph", "compilation_metrics"), {Flaw.NO_GRAPH}),
    (
        "cold_shared",
        ("describe_source", "dynamo_start", "compilation_metrics"),
        {Flaw.NO_START, Flaw.NO_END, Flaw.FIRST_RECORD},
    ),
]
"""Job, events that are lost, and flaws of which the compile has to show one."""


@pytest.mark.parametrize(("name", "events", "flaws"), LOST_TOGETHER)
def test_records_of_one_compile_that_are_lost_together_are_noticed(
    name: str, events: tuple[str, ...], flaws: set[Flaw], job: Callable[[str], Path]
) -> None:
    folder = job(name)
    verdict = edit(folder, 1, lambda text: without_all(text, *events, of=OF_FIRST))
    assert (verdict.exit_code, [d for d in verdict.divergences if d.is_red]) == (6, [])
    assert flaws & shown(folder, 1)


JOINT = """
\tclass inner_f(torch.nn.Module):
\t    def forward(
\t        self,
\t        primals,
\t        tangents,
\t    ):
"""


def test_lowered_graphs_that_a_joint_graph_implies_are_missed(job: Callable[[str], Path]) -> None:
    """Of a backend besides Inductor only the joint graph, or a peer, says that there were any."""

    def lose(text: str) -> str:
        events = ("aot_inference_graph", "inductor_output_code", "inductor_collective_schedule")
        text = without_all(text, *events, "fx_graph_cache_miss")
        text = re.sub(
            '"inductor_cumulative_compile_time_us": [0-9]+', '"inductor_cumulative_compile_time_us": null', text
        )
        found = [record.decode() for record in records(text.encode())]
        place = next(n for n, record in enumerate(found) if '{"dynamo_output_graph"' in record)
        time = found[place].split()[1]
        joint = f'V1121 {time} 1 x.py:1] {{"aot_joint_graph": {{}}, "rank": %d, {OF_FIRST}: 0, "has_payload": "0"}}'
        rank = re.findall('"rank": ([01])', text)[0]
        found.insert(place + 1, rehashed(joint % int(rank) + JOINT))
        return "".join(found)

    folder = job("cold_shared")
    edit(folder, 0, lose)
    verdict = edit(folder, 1, lose)
    assert verdict.exit_code == 6 and Flaw.NO_FORWARD in shown(folder, 0)


def test_a_compile_whose_program_differs_is_compared_though_it_was_lowered_further_elsewhere(
    job: Callable[[str], Path],
) -> None:
    """The negative control of what peers show: what a rank lacks of a different program is no lost record."""
    verdict = edit(job("reduce_op"), 1, lambda text: without_all(text, "aot_inference_graph"))
    assert (verdict.exit_code, verdict.divergences[0].is_red) == (1, True)


def other_run(name: str) -> Callable[[str], str]:
    """A log, and behind it that of another job."""
    return lambda text: text + (JOBS / name / LOG.format(0)).read_text()


@pytest.mark.parametrize("name", ["stride", "order", "warm_cold"])
def test_a_log_of_two_runs_is_not_read_as_one(name: str, job: Callable[[str], Path]) -> None:
    folder = job("cold_shared")
    verdict = edit(folder, 0, other_run(name))
    assert (verdict.exit_code, verdict.divergences) == (6, ())
    assert Lack.TWO_RUNS in shown(folder, 0)


def test_a_second_version_of_torch_is_that_of_a_second_run(job: Callable[[str], Path]) -> None:
    def again(text: str) -> str:
        found = [record.decode() for record in records(text.encode())]
        version = next(record for record in found if '"torch_version"' in record)
        return text + re.sub(r"\d\d:\d\d:\d\d", "23:59:59", version)

    folder = job("training")
    edit(folder, 0, again)
    assert shown(folder, 0) == {Lack.TWO_RUNS}


@pytest.mark.parametrize("part", [slice(None), slice(30, None), slice(0, 40)])
def test_a_log_behind_itself_is_no_second_compile_of_its_frames(part: slice, job: Callable[[str], Path]) -> None:
    found = records((JOBS / "training" / LOG.format(0)).read_bytes())
    verdict = edit(job("training"), 0, lambda text: text + b"".join(found[part]).decode())
    assert (verdict.exit_code, verdict.divergences) == (6, ())


def test_a_record_of_a_different_rank_is_damage(job: Callable[[str], Path]) -> None:
    other = (JOBS / "training" / LOG.format(1)).read_text()
    compile_ = [record.decode() for record in records(other.encode()) if b'"frame_id": 1, ' in record]
    assert compile_
    text = "".join(compile_).replace('"frame_id": 1, ', '"frame_id": 7, ')
    folder = job("training")
    verdict = edit(folder, 0, lambda log: log + text)
    assert (verdict.exit_code, verdict.divergences) == (6, ())
    assert Lack.DAMAGED in shown(folder, 0)


def test_a_log_that_crosses_new_year_is_in_order(job: Callable[[str], Path]) -> None:
    def at_new_year(text: str) -> str:
        found = [record.decode() for record in records(text.encode())]
        split = next(n for n, record in enumerate(found) if '{"compilation_metrics"' in record)
        before = [re.sub(r"^V[0-9]{4}", "V1231", record) for record in found[:split]]
        return "".join(before + [re.sub(r"^V[0-9]{4}", "V0101", record) for record in found[split:]])

    assert edit(job("training"), 0, at_new_year).exit_code == 0


@pytest.mark.parametrize("field", ["dtype", "device", "source", "name"])
@pytest.mark.parametrize("text", [r"\ud800", r"a\udfffb"])
def test_half_of_a_surrogate_pair_is_damage(field: str, text: str, job: Callable[[str], Path]) -> None:
    folder = job("cold_shared")
    for rank in (0, 1):
        verdict = edit(
            folder, rank, lambda log: re.sub(f'"{field}": "[^"]*"', lambda _: f'"{field}": "{text}"', log, count=1)
        )
    assert verdict.exit_code == 6
    assert Lack.DAMAGED in shown(folder, 0) & shown(folder, 1)


def test_a_whole_surrogate_pair_is_text(job: Callable[[str], Path]) -> None:
    def name(log: str) -> str:
        return log.replace('"source": "', r'"source": "\ud83d\ude00')

    folder = job("cold_shared")
    edit(folder, 0, name)
    assert edit(folder, 1, name).exit_code == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("dynamo_output_graph", "dynamo_cpp_guards_str"),
        ("dynamo_output_graph", "aot_inference_graph"),
        ("aot_inference_graph", "inductor_output_code"),
        ("dynamo_cpp_guards_str", "inductor_output_code"),
        ("dynamo_graph_break_reason", "aot_forward_graph"),
        ("dynamo_graph_break_reason", "torch_version"),
        ("recompile_reasons", "inductor_output_code"),
    ],
)
def test_a_payload_that_is_that_of_a_different_event_is_damage(
    one: str, other: str, job: Callable[[str], Path]
) -> None:
    def exchange(text: str) -> str:
        found = [record.decode() for record in records(text.encode())]
        places = [next(n for n, record in enumerate(found) if f'"{name}"' in record) for name in (one, other)]
        lines, payloads = zip(*(found[place].split("\n", 1) for place in places), strict=True)
        for place, line, payload in zip(places, lines, reversed(payloads), strict=True):
            found[place] = rehashed(f"{line}\n{payload}")
        return "".join(found)

    folder = job("training")
    verdict = edit(folder, 1, exchange)
    assert (verdict.exit_code, verdict.divergences) == (6, ())
    assert Lack.DAMAGED in shown(folder, 1)
