"""What was scheduled, what ran and in which group -> a finding, although the graphs agree."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.evidence.logs.damage import records, rehashed
from tests.evidence.logs.test_damage import shown
from tests.evidence.logs.test_diagnose import JOBS, LOG
from tpcompile.evidence.logs.diagnose import Question, diagnose
from tpcompile.evidence.logs.ends import Lack
from tpcompile.evidence.records import DivergenceClass, Verdict
from tpcompile.evidence.records.causes import Cause

OP = "torch.ops._c10d_functional."
REDUCE, GATHER, WAIT = f"{OP}all_reduce_.default", f"{OP}all_gather_into_tensor.default", f"{OP}wait_tensor.default"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A copy of a job whose ranks agree."""
    return Path(shutil.copytree(JOBS / "cold_shared", tmp_path / "job"))


def artifact(name: str, value: object, of_compile: str = "") -> str:
    """A JSON artifact as torch logs it."""
    payload = json.dumps(value)
    sha = hashlib.md5(payload.encode(), usedforsecurity=False).hexdigest()
    body = f'{{"artifact": {{"name": "{name}", "encoding": "json"}}{of_compile}, "has_payload": "{sha}"}}'
    return f"V1121 15:20:00.000000 1 x.py:1] {body}\n\t{payload}\n"


def schedule(job: Path, *by_rank: list[str]) -> Verdict:
    """Add what Inductor scheduled on each rank."""
    for rank, names in enumerate(by_rank):
        if not names:
            continue
        place = f', "rank": {rank}, "frame_id": 0, "frame_compile_id": 0, "attempt": 0'
        append(job, rank, artifact("inductor_collective_schedule", names, place))
    return diagnose([job])


def append(job: Path, rank: int, text: str) -> None:
    """Add to the log of a rank."""
    with (job / LOG.format(rank)).open("a") as file:
        file.write(text)


def next_frame(name: str) -> str:
    """The log of a job as that of the next frame in the same process, whose strings were logged before."""
    found = records((JOBS / name / LOG.format(0)).read_bytes())
    text = b"".join(record for record in found if b'] {"str"' not in record).decode()
    return text.replace('"frame_id": 0', '"frame_id": 1')


def test_a_collective_that_one_rank_does_not_schedule_is_a_finding_under_equal_graphs(job: Path) -> None:
    verdict = schedule(job, [REDUCE, GATHER, WAIT], [REDUCE, WAIT])
    (found,) = [d for d in verdict.divergences if d.is_red]
    assert (verdict.exit_code, found.cause) == (1, Cause.EXTRA_COLLECTIVE)
    items = [(group.ranks, group.item and group.item.fields["value"]) for group in found.groups]
    assert items == [((0,), "all_gather_into_tensor.default"), ((1,), "nothing, 1 in all")]
    assert found.line is not None and found.line.function == "healthy"


def test_a_different_order_of_the_same_collectives_is_a_finding_of_order(job: Path) -> None:
    (found,) = [d for d in schedule(job, [REDUCE, GATHER], [GATHER, REDUCE]).divergences if d.is_red]
    assert found.cause == Cause.ORDER_FORWARD


@pytest.mark.parametrize("other", [[REDUCE, GATHER, WAIT, WAIT], [REDUCE, WAIT, GATHER, WAIT]])
def test_where_a_rank_waits_is_no_finding(job: Path, other: list[str]) -> None:
    assert schedule(job, [REDUCE, WAIT, GATHER, WAIT], other).exit_code == 0


def test_a_schedule_that_one_rank_did_not_log_was_not_observed(job: Path) -> None:
    verdict = schedule(job, [REDUCE, WAIT])
    assert verdict.exit_code == 6
    assert Lack.FEWER in shown(job, 1)


def test_a_schedule_of_code_that_one_rank_loaded_from_a_cache_is_none_that_it_lacks(tmp_path: Path) -> None:
    warm = Path(shutil.copytree(JOBS / "warm_cold", tmp_path / "job"))
    assert schedule(warm, [], [REDUCE, WAIT]).exit_code == 0


def test_graphs_that_ran_in_a_different_order_are_a_finding(tmp_path: Path) -> None:
    job = Path(shutil.copytree(JOBS / "order", tmp_path / "job"))
    shutil.copy(JOBS / "order" / LOG.format(0), job / LOG.format(1))
    shutil.copy(job / LOG.format(0), tmp_path / "first.log")
    for rank, order in enumerate((["0/0", "1/0"], ["1/0", "0/0"])):
        other = next_frame("reduce_op")
        runs = {"graph_execution_order": [{"compile_id": name} for name in order]}
        append(job, rank, other + artifact("graph_execution", runs))
    verdict = diagnose([job])
    (found,) = [d for d in verdict.divergences if d.is_red]
    assert (verdict.exit_code, found.cause, found.where) == (1, Cause.ORDER_FORWARD, "")
    assert [group.item is not None and "all_reduce" in group.item.text for group in found.groups] == [True, True]


def test_a_group_that_one_rank_alone_uses_is_a_finding(job: Path) -> None:
    path = job / LOG.format(1)
    path.write_text(in_group(path.read_text(), "5"))
    (found,) = [d for d in diagnose([job]).divergences if d.is_red]
    assert found.cause == Cause.GROUP
    assert re.search("all_reduce .* '0' .*rank 0 .*all_reduce .* '5' .*rank 1", found.title)


@pytest.mark.parametrize(("size", "code"), [(1, 0), (2, 1)])
def test_a_group_of_one_rank_is_no_finding_and_a_larger_one_that_one_rank_uses_is(
    size: int, code: int, job: Path
) -> None:
    for rank in (0, 1):
        path = job / LOG.format(rank)
        text = in_group(path.read_text(), str(5 + rank))
        gather = text.replace("all_reduce(", "all_gather_into_tensor(").replace(
            "all_reduce.", "all_gather_into_tensor."
        )
        path.write_text(rehashed(gather.replace(f"'sum', '{5 + rank}')", f"{size}, '{5 + rank}')")))
    verdict = diagnose([job])
    assert verdict.exit_code == code
    assert [d.cause for d in verdict.divergences if d.is_red] == [Cause.GROUP] * code


def test_groups_of_stages_are_no_finding(tmp_path: Path) -> None:
    for rank in range(4):
        text = (JOBS / "cold_shared" / LOG.format(rank % 2)).read_text()
        (tmp_path / LOG.format(rank)).write_text(in_group(text, str(5 + rank // 2)))
    verdict = diagnose([tmp_path])
    assert (verdict.exit_code, sorted(verdict.domains)) == (0, ["ranks 0-1", "ranks 2-3"])


def in_group(text: str, name: str) -> str:
    """A log whose collectives are issued in a group that is not the default one."""
    text = text.replace("'sum', '0')", f"'sum', '{name}')").replace("group_name == '0'", f"group_name == '{name}'")
    return rehashed(text)


def without_collectives(text: str) -> str:
    """A log whose compiled code issues no collective."""
    text = text.replace("G['dist'].group.WORLD.group_name == '0'", "G['dist'].flag == '0'")
    return rehashed(text.replace("torch.ops._c10d_functional.", "torch.ops.mine."))


def test_replicas_of_other_sizes_whose_code_issues_no_collective_are_green(tmp_path: Path) -> None:
    for rank in (0, 1):
        text = (JOBS / "cold_shared" / LOG.format(rank)).read_text()
        text = text.replace("[4, 4][4, 1]", "[8, 4][4, 1]").replace("[4, 4]", "[8, 4]") if rank else text
        (tmp_path / LOG.format(rank)).write_text(without_collectives(text))
    verdict = diagnose([tmp_path])
    assert verdict.exit_code == 0
    assert "--mesh" in verdict.divergences[0].advice


def test_an_evaluation_on_one_rank_is_green_and_listed(job: Path) -> None:
    append(job, 0, without_collectives(next_frame("reduce_op")))
    verdict = diagnose([job])
    assert verdict.exit_code == 0
    (found,) = verdict.divergences
    assert (found.cause, [group.ranks for group in found.groups if group.item]) == (Cause.EXTRA_COMPILE, [(0,)])


def test_a_function_declared_uneven_is_listed_with_its_reason(tmp_path: Path) -> None:
    verdict = diagnose([JOBS / "stride"], Question(uneven=(("healthy", "ragged batches"),)))
    assert verdict.exit_code == 0
    assert verdict.divergences[0].cls == DivergenceClass.DECLARED
    assert "ragged batches" in verdict.divergences[0].advice


def test_uneven_does_not_cover_collectives() -> None:
    assert diagnose([JOBS / "reduce_op"], Question(uneven=(("step", "ragged batches"),))).exit_code == 1
