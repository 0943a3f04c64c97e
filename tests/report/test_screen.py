from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.report import samples
from tpcompile.evidence.records import Layer, Lead, RankGroup, Status, Verdict, value_item
from tpcompile.report import screen
from tpcompile.report.wording import do_first_label

LEAD = Lead(says="node 4 multiplies by 8", ranks=(7,), line=samples.LINE, do_first="make the constant a buffer")
LONG = "a difference that takes many words to say, " * 12


def shown(verdict: Verdict, folder: Path, *, width: int = 80) -> list[str]:
    """The lines that a console of that width gets."""
    out = io.StringIO()
    screen.render(
        verdict,
        Console(file=out, width=width, force_terminal=True, color_system=None),
        command="diagnose",
        folder=folder,
    )
    return out.getvalue().splitlines()


def many(number: int) -> Verdict:
    """A verdict with that many differences, each with long text, and as many accepted ones, domains and checks."""
    groups = (
        RankGroup(ranks=(0,), item=value_item("item", LONG)),
        RankGroup(ranks=(1,), item=value_item("item", LONG[::-1])),
    )
    found = [samples.divergence(groups=groups, title=f"difference called {n}: {LONG}") for n in range(number)]
    checks = [samples.check(name=f"check {n} {LONG}", status=status) for n in range(number) for status in Status]
    update = {
        "divergences": tuple(found),
        "checks": tuple(checks),
        "domains": {f"domain {n}": ((0,), (1,)) for n in range(number)},
        "summary": LONG,
        "lead": LEAD.model_copy(update={"says": LONG, "do_first": LONG}),
    }
    return samples.failing().model_copy(update=update)


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("number", [1, 200])
def test_whatever_differs_is_at_most_a_screen(number: int, width: int, tmp_path: Path) -> None:
    lines = [line for line in shown(many(number), tmp_path, width=width) if str(tmp_path) not in line]
    assert len(lines) <= 38  # and two paths


def test_the_files_hold_every_difference(tmp_path: Path) -> None:
    lines = shown(many(200), tmp_path / "out")
    report, data = tmp_path / "out" / "report.txt", tmp_path / "out" / "verdict.json"
    assert lines[-2:] == [f"full report: {report}", f"as JSON: {data}"]
    assert len(Verdict.model_validate_json(data.read_text()).divergences) == 200
    text = report.read_text()
    assert all(f"difference {n} of 200" in text for n in range(1, 201))
    assert [line for line in lines if " 199 " in line]


def test_the_lead_is_first_and_last(tmp_path: Path) -> None:
    verdict = samples.failing().model_copy(update={"lead": LEAD})
    lines = [line for line in shown(verdict, tmp_path, width=200) if str(tmp_path) not in line]
    assert LEAD.says in lines[1]
    assert verdict.summary in lines[-2]
    assert lines[-1] == f"{do_first_label(LEAD)}: {LEAD.do_first}"


def test_what_to_do_names_ranks_that_are_known_to_be_wrong_alone() -> None:
    unknown = LEAD.model_copy(update={"is_rank_known": False})
    everywhere = LEAD.model_copy(update={"ranks": (), "line": None})
    package = LEAD.model_copy(update={"line": samples.LINE.model_copy(update={"file": "/app/conf/__init__.py"})})
    assert do_first_label(package).endswith(f" rank 7 in conf/__init__.py:{samples.LINE.line}")
    place = f"{Path(samples.LINE.file).name}:{samples.LINE.line}"
    labels = [do_first_label(lead) for lead in (LEAD, unknown, everywhere)]
    assert [("rank 7" in label, label.endswith(f" in {place}")) for label in labels] == [
        (True, True), (False, True), (False, False),
    ]  # fmt: skip


def test_a_green_verdict_that_fits_leaves_no_files(tmp_path: Path) -> None:
    checks = (samples.check(name="graph equal on all ranks", layer=Layer.GRAPH),)
    verdict = Verdict(status=Status.PASS, exit_code=0, world_size=2, checks=checks, summary="2 ranks agree")
    lines = shown(verdict, tmp_path / "out")
    assert lines[-1].startswith("PASS ") and lines[-1].endswith(verdict.summary)
    assert [line for line in lines if line.endswith(": graph")]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_one_line_and_the_verdict_stands(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines = shown(many(2), tmp_path / "file" / "out", width=300)
    assert str(tmp_path / "file") in lines[-1] and "--run-dir" in lines[-1]
    assert any(line.startswith("FAIL (exit 1)") for line in lines)
