"""A job with a damaged log -> neither a difference that it does not have, nor a pass for one that it has."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.logs.damage import OF_TWO, OPERATORS, moved, records, rehashed, two_runs
from tests.evidence.logs.test_diagnose import JOBS, LOG, check
from tpcompile.evidence.compiles.contradictions import Flaw
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.logs.diagnose import INPUTS, LEFT_OUT, diagnose
from tpcompile.evidence.logs.domains import Domain
from tpcompile.evidence.logs.ends import Lack, log_ends
from tpcompile.evidence.logs.ranklog import read_rank_log
from tpcompile.evidence.records import Verdict

FUZZ = [
    pytest.param(0, 540, id="fixed"),
    pytest.param(None, 120, id="fresh"),
    pytest.param(540, 540, id="the other fixed", marks=pytest.mark.slow),
    pytest.param(None, 240, id="more fresh", marks=pytest.mark.slow),
]
"""First seed, None for a fresh one, and number of damaged logs."""
HEALTHY = ("cold_shared", "training", "warm_cold")
FAULTY = ("graph_break", "limit", "order", "reduce_op", "stride", "training_scale")


def damaged(seed: int, folder: Path) -> tuple[str, str]:
    """Write the job of that seed with one damaged log -> its name and the kind of damage."""
    rng = random.Random(seed)
    name = rng.choice(HEALTHY + FAULTY)
    operators = (*OPERATORS, *OF_TWO)
    operator = operators[seed % len(operators)]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(JOBS / name, folder)
    rank = rng.randrange(2)
    path = folder / LOG.format(rank)
    peer = {moved: JOBS / name / LOG.format(1 - rank), two_runs: JOBS / rng.choice(HEALTHY) / LOG.format(rank)}
    second = {"peer": peer[operator].read_bytes()} if operator in peer else {}
    path.write_bytes(operator(path.read_bytes(), rng, **second))
    return name, operator.__name__


def wrong(seed: int, folder: Path) -> str:
    """What is wrong with the verdict on the job of that seed; empty for nothing."""
    name, damage = damaged(seed, folder)
    began = time.process_time()
    try:
        exit_code = diagnose([folder]).exit_code
    except Exception as error:
        return f"seed {seed}: {name}, {damage}: {error!r}"
    took_s = time.process_time() - began
    expected = (0, 6) if name in HEALTHY else (1, 6)
    if exit_code in expected and took_s < 2:
        return ""
    return f"seed {seed}: {name}, {damage}: exit code {exit_code} after {took_s:.1f} s"


@pytest.mark.parametrize(("first", "number"), FUZZ)
def test_a_damaged_log_makes_no_healthy_job_red_and_no_faulty_one_green(
    first: int | None, number: int, tmp_path: Path
) -> None:
    if first is None:
        first = random.SystemRandom().randrange(10**6, 10**12)
    found = [wrong(seed, tmp_path / "job") for seed in range(first, first + number)]
    assert not list(filter(None, found))


@pytest.mark.parametrize("seed", [113623609838])  # a graph of Dynamo, with symbolic sizes, as that of a backward
def test_a_seed_that_was_wrong_once(seed: int, tmp_path: Path) -> None:
    assert not wrong(seed, tmp_path / "job")


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of a recorded job, to damage."""
    return lambda name: Path(shutil.copytree(JOBS / name, tmp_path / name))


def edit(job: Path, rank: int, change: Callable[[str], str]) -> Verdict:
    """The verdict on a job with an edited log of one rank."""
    path = job / LOG.format(rank)
    before = path.read_text()
    after = change(before)
    assert after != before
    path.write_text(after)
    return diagnose([job])


def without(text: str, *parts: str) -> str:
    """A log without the first record whose line has all of these."""
    found = [record.decode() for record in records(text.encode())]
    lost = next(record for record in found if all(part in record.partition("\n")[0] for part in parts))
    found.remove(lost)
    return "".join(found)


def shown(folder: Path, rank: int) -> set[Lack | Flaw | str]:
    """What the log of a rank lacks; of its first damaged compile the id, what is wrong, and the event that shows it."""
    logs = ByRank({rank: read_rank_log(rank, folder / LOG.format(rank)) for rank in (0, 1)})
    end = log_ends(logs, [], [Domain("all", (0, 1))])[rank]
    if end.damaged is None:
        return {*end.lacks}
    assert end.damaged.damage is not None
    return {*end.lacks, end.damaged.compile_id, *end.damaged.damage}


@pytest.mark.parametrize("name", ["cold_shared", "training"])
def test_a_payload_that_is_not_the_hashed_one_is_not_observed(name: str, job: Callable[[str], Path]) -> None:
    folder = job(name)
    verdict = edit(folder, 1, lambda text: text.replace("torch.relu", "torch.tanh", 1))
    assert (verdict.exit_code, verdict.divergences) == (6, ())
    assert shown(folder, 1) >= {Lack.DAMAGED, Flaw.DAMAGED}


def test_a_program_that_differs_in_hashed_payloads_is_a_difference(job: Callable[[str], Path]) -> None:
    verdict = edit(job("cold_shared"), 1, lambda text: rehashed(text.replace("torch.relu", "torch.tanh")))
    assert verdict.exit_code == 1


@pytest.mark.parametrize("name", ["stride", "limit"])
def test_a_recompile_whose_reason_is_lost_is_not_harmless(name: str, job: Callable[[str], Path]) -> None:
    folder = job(name)
    verdict = edit(folder, 1, lambda text: without(text, "recompile_reasons"))
    assert verdict.exit_code == 6
    assert shown(folder, 1) >= {"0/1", Flaw.NO_REASON}
    assert "no collective" not in str(verdict)


@pytest.mark.parametrize("end", [bytes(4096), b"\0", b"{not json}\n"])
def test_what_stands_behind_the_end_is_no_part_of_a_whole_log(end: bytes, job: Callable[[str], Path]) -> None:
    folder = job("cold_shared")
    with (folder / LOG.format(0)).open("ab") as file:
        file.write(end)
    assert diagnose([folder]).exit_code == 6
    assert Lack.CUT in shown(folder, 0)


def test_a_log_without_its_last_newline_is_cut(job: Callable[[str], Path]) -> None:
    folder = job("cold_shared")
    assert edit(folder, 0, lambda text: text.removesuffix("\n")).exit_code == 6
    assert Lack.CUT in shown(folder, 0)


def test_text_between_two_records_is_damage_and_both_are_read(job: Callable[[str], Path]) -> None:
    log = job("cold_shared") / LOG.format(0)
    whole = read_rank_log(0, log).compiles[0]
    text = log.read_text()
    log.write_text(text.replace("\nV", "\n\0\0\0\nV"))
    damaged = read_rank_log(0, log)
    assert damaged.facts.num_damaged == text.count("\nV") == damaged.facts.num_records - 1
    assert (damaged.compiles[0].sha, damaged.compiles[0].names) == (whole.sha, whole.names)


def test_a_graph_that_torch_export_captured_under_an_id_of_before_is_no_damage(job: Callable[[str], Path]) -> None:
    def export(text: str) -> str:
        found = [record.decode() for record in records(text.encode())]
        names = ("describe_tensor", "describe_source", "dynamo_output_graph")
        captured = [
            record.replace(":15:", ":59:") for record in found if any(f'{{"{name}"' in record for name in names)
        ]
        return text + "".join(captured)

    assert edit(job("stride"), 0, export).exit_code == 1
    assert edit(job("cold_shared"), 0, export).exit_code == 0


@pytest.mark.parametrize(
    ("before", "after", "shows"),
    [
        ('"name": "healthy", "filename"', '"name": "healtly", "filename"', {Flaw.OTHER_FUNCTION}),
        ('{"dynamo_start"', '{"dynamo_stars"', {Flaw.FIRST_RECORD, "describe_tensor"}),
        ('{"dynamo_output_graph"', '{"dynamo_outputegraph"', {Flaw.NO_GRAPH}),
        ('{"dynamo_cpp_guards_str"', '{"dynamo_cpp_guards_stt"', {Flaw.NO_GUARDS}),
        ('{"str": ["/app/tests/data/record', '{"str": ["/app/tests/dat/record', {Flaw.OTHER_FUNCTION}),
        ('{"describe_tensor"', '{"describe_sensor"', {Flaw.NO_TENSOR}),
        ('{"aot_inference_graph"', '{"aot_inference_grape"', {Lack.FEWER}),
        ('"frame_compile_id": 0, "attempt": 0, "has', '"frame_compile_id": 7, "attempt": 0, "has', {"0/0"}),
    ],
)  # fmt: skip
def test_a_byte_of_an_envelope_that_still_parses_is_noticed(
    before: str, after: str, shows: set[Lack | Flaw | str], job: Callable[[str], Path]
) -> None:
    folder = job("cold_shared")
    verdict = edit(folder, 0, lambda text: text.replace(before, after, 1))
    assert (verdict.exit_code, verdict.divergences) == (6, ())
    assert shown(folder, 0) >= shows


@pytest.mark.parametrize(
    ("event", "shows"),
    [
        ("recompile_reasons", Flaw.NO_REASON),
        ("dynamo_graph_break_reason", Flaw.NO_BREAK_REASON),
        ('"aot_forward_graph"', Flaw.NO_FORWARD),
        ("inductor_output_code", Flaw.NO_CODE),
        ('"aot_inference_graph"', Flaw.NO_LOWERED),
        ("inductor_collective_schedule", Lack.FEWER),
        ("torch_version", Lack.FEWER),
        ("dynamo_output_graph", Flaw.NO_GRAPH),
        ('"compilation_metrics"', Lack.UNFINISHED),
    ],
)
def test_a_lost_record_of_a_real_log_is_noticed(event: str, shows: Lack | Flaw, job: Callable[[str], Path]) -> None:
    folder = job("training")
    verdict = edit(folder, 0, lambda text: without(text, event))
    assert verdict.exit_code == 6, verdict.summary
    assert shows in shown(folder, 0)


def test_the_lost_records_of_a_whole_frame_are_noticed(job: Callable[[str], Path]) -> None:
    def lose(text: str) -> str:
        found = [record.decode() for record in records(text.encode())]
        return "".join(record for record in found if '"frame_id": 1, ' not in record.partition("\n")[0])

    folder = job("training")
    assert edit(folder, 0, lose).exit_code == 6
    assert shown(folder, 0) == {Lack.GAPS}


def test_a_size_that_only_the_description_of_an_input_has_is_no_difference(job: Callable[[str], Path]) -> None:
    verdict = edit(job("cold_shared"), 1, lambda text: text.replace('"size": [4, 4]', '"size": [9, 4]', 1))
    assert (verdict.exit_code, [found.is_red for found in verdict.divergences]) == (6, [False])
    assert "x: shape [4, 4] / [9, 4]" in check(verdict, INPUTS).details[0]


def test_a_record_that_was_written_twice_counts_once(job: Callable[[str], Path]) -> None:
    def double(text: str) -> str:
        found = [record.decode() for record in records(text.encode())]
        return "".join(record * (1 + ("dynamo_output_graph" in record)) for record in found)

    assert edit(job("cold_shared"), 1, double).exit_code == 0


def test_the_frame_of_a_damaged_compile_is_not_compared_and_the_others_are(job: Callable[[str], Path]) -> None:
    folder = job("training")
    edit(folder, 1, lambda text: text.replace("torch.relu", "torch.tanh", 1))
    log = read_rank_log(1, folder / LOG.format(1))
    (broken,) = {log.compiles[number].frame for number in range(len(log.compiles)) if number not in log.sound}
    assert broken.function.startswith("torch_dynamo_resume_in_forward")
    assert {compile_.frame.function for compile_ in log.sound.values()} == {"forward", "reduced"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (r'\{"str": \[.*?\]', '{"str": null'),
        (r'\{"dynamo_start": \{.*\]\}', '{"dynamo_start": 3'),
        (r'"stack": \[\{.*?\}\]', '"stack": [7]'),
        (r'"frame_id": 0', '"frame_id": "zero"'),
        (r'"frame_id": 0', '"frame_id": ' + "9" * 5000),
        (r'"attempt": 0', '"attempt": -1'),
        (r'"frame_compile_id": 0', '"frame_compile_id": true'),
        (r'\{"describe_source": \{.*?\}', '{"describe_source": {"id": [], "source": "x"}'),
        (r'"describe_tensor": \{', '"describe_tensor": {"id": {}, "x": {'),
        (r'"source": "[^"]*"', '"source": NaN'),
        (r'\{"dynamo_output_graph": \{.*?\}\}', '{"dynamo_output_graph": null'),
    ],
)
def test_a_value_of_a_different_type_is_a_damaged_record(before: str, after: str, job: Callable[[str], Path]) -> None:
    folder = job("cold_shared")
    verdict = edit(folder, 1, lambda text: re.sub(before, lambda _: after, text, count=1))
    assert verdict.exit_code == 6
    assert Lack.DAMAGED in shown(folder, 1)


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("inductor_collective_schedule", {"a": 1}),
        ("graph_execution", {"graph_execution_order": [None]}),
        ("graph_execution", 7),
        ("torch_version", []),
        ("tpcompile_fusion", {"launched": {"phase": 3}}),
    ],
)
def test_json_of_a_different_shape_in_a_hashed_payload_is_a_damaged_record(
    name: str, payload: object, job: Callable[[str], Path]
) -> None:
    artifact = f'{{"artifact": {{"name": "{name}"}}, "frame_id": 0, "frame_compile_id": 0, "has_payload": "0"}}'
    record = f"V1121 15:59:00.000000 1 x.py:1] {artifact}\n\t{json.dumps(payload)}\n"
    folder = job("cold_shared")
    edit(folder, 1, lambda text: text + rehashed(record))
    verdict = edit(folder, 1, lambda text: text + text[-1000:][text[-1000:].rindex("\nV") + 1 :])
    assert verdict.exit_code == 6


def test_links_in_a_loop_and_names_that_are_not_utf_8_are_one_line_each(job: Callable[[str], Path]) -> None:
    folder = job("cold_shared")
    names = [folder / f"dedicated_log_torch_trace_rank_3_{name}.log" for name in "ab"]
    names[0].symlink_to(names[1])
    names[1].symlink_to(names[0])
    (folder / "dedicated_log_torch_trace_\udcff.log").touch()
    verdict = diagnose([folder])
    assert verdict.exit_code == 0
    lines = check(verdict, LEFT_OUT).details
    assert "\n".join(lines).encode().count(b"\\xff") == 1  # it can be written, too
    assert sum("symbolic links" in line for line in lines) == 2


@pytest.mark.skipif(sys.platform == "darwin", reason="file systems there have UTF-8 names only")
def test_a_log_whose_name_is_not_utf_8_is_read(job: Callable[[str], Path]) -> None:
    folder = job("stride")
    (folder / LOG.format(1)).rename(folder / "dedicated_log_torch_trace_rank_1_\udcff.log")
    assert diagnose([folder]).exit_code == 1
