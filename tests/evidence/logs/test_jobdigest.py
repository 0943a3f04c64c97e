"""What is not parsed because its text is equal changes no verdict; domains follow the groups that code names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evidence.logs.damage import rehashed
from tests.evidence.logs.test_diagnose import JOBS
from tpcompile.errors import ConfigError
from tpcompile.evidence.logs import diagnose as diagnose_module
from tpcompile.evidence.logs import jobdigest
from tpcompile.evidence.logs.diagnose import diagnose
from tpcompile.evidence.logs.domains import DEFAULT_GROUP, Domains, Source, by_groups, parse_mesh, roles_of
from tpcompile.evidence.logs.ranklog import read_rank_log

NAMES = sorted(path.name for path in JOBS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_large_job_is_judged_as_a_small_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = diagnose([JOBS / name])
    monkeypatch.setattr(jobdigest.select, "__kwdefaults__", {"budget_bytes": 1, "small_bytes": 0})
    large = diagnose([JOBS / name])
    assert (large.exit_code, large.summary.partition(";")[0]) == (small.exit_code, small.summary.partition(";")[0])
    assert [d for d in large.divergences if d.is_red] == [d for d in small.divergences if d.is_red]


def test_equal_programs_have_equal_text_although_their_ids_differ() -> None:
    logs = [read_rank_log(rank, next((JOBS / "cold_shared").glob(f"*rank_{rank}_*"))) for rank in (0, 1)]
    assert logs[0].compiles[0].sha == logs[1].compiles[0].sha


@pytest.mark.parametrize(
    "difference",
    [
        ("relu * 2;", "relu * 3;"),  # a constant of the graph
        ("stride=[4, 1])", "stride=[4, 2])"),  # a guard
        ("(hasattr", "(12345678, hasattr"),  # a long number that is no id
    ],
    ids=["constant", "guard", "long number"],
)
def test_what_the_user_wrote_is_in_the_hash(difference: tuple[str, str], tmp_path: Path) -> None:
    before = next((JOBS / "cold_shared").glob("*rank_0_*")).read_text()
    before = before.replace("DIMENSION_DYNAMIC_MARKING_GUARD: hasattr", "DIMENSION_DYNAMIC_MARKING_GUARD: (hasattr")
    shas = []
    for number, text in enumerate((before, before.replace(*difference))):
        path = tmp_path / f"{number}.log"
        path.write_text(rehashed(text))
        shas.append(read_rank_log(0, path).compiles[0].sha)
    assert shas[0] != shas[1]


def ranks(found: Domains) -> list[tuple[int, ...]]:
    """The ranks of every domain."""
    return [domain.ranks for domain in found.domains]


def test_pipeline_stages_that_share_no_group_are_domains_of_their_own() -> None:
    assert ranks(by_groups({0: ["5"], 1: ["5"], 2: ["6"], 3: ["6"]})) == [(0, 1), (2, 3)]


def test_the_default_group_holds_every_rank() -> None:
    assert ranks(by_groups({0: [DEFAULT_GROUP, "5"], 1: [], 2: ["6"]})) == [(0, 1, 2)]


def test_a_rank_whose_code_names_no_group_stays_with_the_others() -> None:
    assert ranks(by_groups({0: ["5"], 1: ["5"], 2: []})) == [(0, 1, 2)]


def test_a_rank_that_broke_its_graph_stays_with_its_peer_beside_a_whole_stage() -> None:
    assert ranks(by_groups({0: ["5"], 1: ["5"], 2: ["6"], 3: []})) == [(0, 1), (2, 3)]


def test_two_ranks_that_each_use_a_group_of_their_own_are_compared() -> None:
    assert ranks(by_groups({0: ["5"], 1: ["6"]})) == [(0, 1)]


def test_a_rank_whose_peer_left_no_log_is_compared_with_no_rank() -> None:
    groups = {0: ["5"], 1: ["5"], 3: ["6"]}
    assert ranks(by_groups(groups, missing=[2])) == [(0, 1), (3,)]
    assert ranks(by_groups(groups)) == [(0, 1, 3)]
    assert ranks(by_groups({0: ["5"], 1: ["6"]}, missing=[2])) == [(0, 1)]  # one of them at least has no peer there


def test_which_ranks_must_agree_is_unknown_where_no_code_names_a_group() -> None:
    assert by_groups({0: [], 1: []}).source == Source.NOTHING


def test_a_mesh_says_which_ranks_must_agree() -> None:
    assert ranks(parse_mesh("dp=2,tp=4", "tp").domains()) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert ranks(parse_mesh("dp=2,tp=2", "dp").domains()) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("mesh", "axis"), [("dp=2,tp", "tp"), ("dp=2,dp=2", "dp"), ("dp=2,tp=2", "pp"), ("=2", "")])
def test_a_mesh_that_is_none_is_refused(mesh: str, axis: str) -> None:
    with pytest.raises(ConfigError, match=r"--(mesh|axis)"):
        parse_mesh(mesh, axis)


def test_groups_of_replicas_stand_for_each_other_and_one_name_is_one_group() -> None:
    found = roles_of({0: ["0", "3"], 1: ["0", "3"], 2: ["0", "4"], 3: ["4", "0"]})
    assert found[0] == {"0": "group#0", "3": "group#1"}
    assert found[2] == found[3] == {"0": "group#0", "4": "group#1"}


def test_a_group_beside_a_shared_one_is_a_different_group() -> None:
    found = roles_of({0: ["0"], 1: ["5", "0"]})
    assert found[1] == {"0": "group#0", "5": "group#1"}


def test_what_was_not_looked_into_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (JOBS / "warm_cold").iterdir():
        text = path.read_text()
        again = text.replace('"frame_id": 0', '"frame_id": 1').replace('"healthy"', '"again"')
        (tmp_path / path.name).write_text(text + again)
    monkeypatch.setattr(jobdigest.select, "__kwdefaults__", {"budget_bytes": 1, "small_bytes": 0})
    assert diagnose([tmp_path]).exit_code == 0
    monkeypatch.setattr(diagnose_module, "MAX_BYTES", 1)
    verdict = diagnose([tmp_path])
    assert verdict.exit_code == 6
    assert "1 more functions" in verdict.summary
    assert diagnose_module.EXAMINED in {check.name for check in verdict.checks}
