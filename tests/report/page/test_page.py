"""What a page shows of a run, as data and as HTML."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.evidence.samples import call, compiled, line, record, reduce
from tests.report import samples as verdicts
from tests.report.page.samples import HOSTILE, big_run, rank, write_run
from tpcompile.cli.outputs import write_page
from tpcompile.errors import ConfigError
from tpcompile.evidence.logs.diagnose import examined
from tpcompile.evidence.records import Item, UserLine, Verdict, value_item
from tpcompile.evidence.records.findings import Parted, Went
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.timeline.stream import Event as Did
from tpcompile.evidence.timeline.stream import Kind, Stream, TimedStream
from tpcompile.report.page import of_run, view
from tpcompile.report.page.evidence import Event, Evidence
from tpcompile.report.page.excerpt import excerpt
from tpcompile.report.page.gather import gathered
from tpcompile.report.page.html import page
from tpcompile.report.page.listing import listing
from tpcompile.report.page.of_logs import evidence_of_logs
from tpcompile.report.page.of_run import evidence_of_run
from tpcompile.report.page.perfetto import trace
from tpcompile.report.page.shown import View
from tpcompile.report.page.view import view_of

JOBS = Path(__file__).parents[2] / "data" / "jobs" / "torch-2.13.0"


class _Read(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def judge(run: RunDir) -> Verdict:
    """No run of these tests lacks its verdict."""
    raise AssertionError(run.path)


def seen(path: Path) -> View:
    with gathered(path, judge) as evidence:
        return view_of(evidence)


def test_the_page_of_a_run_shows_both_sides_from_the_first_difference_on(tmp_path: Path) -> None:
    shown = seen(write_run(tmp_path, [rank(0), rank(1, factor=3)]).path)
    difference = shown.differences[0]
    assert (shown.is_green, shown.world_size) == (False, 2)
    assert [side.ranks for side in difference.sides] == ["rank 0", "rank 1"]
    assert difference.listing is not None
    first = next(row for row in difference.listing.rows if row is not None and row.differs)
    assert ("2" in str(first.left), "3" in str(first.right)) == (True, True)


def test_where_it_is_seen_and_where_the_ranks_parted_and_a_line_that_both_sides_share_once() -> None:
    seen_at, origin, other = verdicts.LINE, verdicts.OTHER_LINE, UserLine(file="/repo/other.py", line=3)
    sides = tuple(Went(ranks=(n,), how="value", line=(origin, other)[n], value=f"returns {n}") for n in range(2))
    parted = Parted(line=origin, times=0, sides=sides)
    shown = view._parting(
        verdicts.LEAD.model_copy(update={"line": origin, "seen_at": seen_at, "parted": parted}), guard=""
    )
    assert shown.source is not None and shown.parted_at is not None
    assert (shown.source.place, shown.parted_at.place) == (str(seen_at), str(origin))
    assert [side.source is None for side in shown.sides] == [True, False]


def test_layers_guards_and_settings_are_shown_with_the_values_of_the_ranks(tmp_path: Path) -> None:
    shown = seen(write_run(tmp_path, [rank(0), rank(1, factor=3), rank(2)]).path)
    grid = {layer.name: layer for layer in shown.grid}
    assert (grid["graph"].codes, grid["graph"].groups) == ((0, 1, 0), ("0,2", "1"))
    assert grid["collectives"].groups == ("0-2",)
    (guards,) = shown.guards
    differing = [row for row in guards.rows if row.differs]
    assert [[value.ranks for value in row.values] for row in differing] == [["0,2", "1"]]
    assert [row.about for row in shown.environment if row.differs] == ["num_threads"]
    agree = seen(write_run(tmp_path / "equal", [rank(0), rank(1)]).path)
    assert (agree.is_green, agree.differences, agree.parting) == (True, (), None)
    assert not any(row.differs for guards in agree.guards for row in guards.rows)


def test_ranks_without_a_clock_are_shown_in_order_and_equal_ones_share_a_row(tmp_path: Path) -> None:
    shown = seen(write_run(tmp_path, [rank(0), rank(1), rank(2)]).path)
    assert (shown.has_clock, [lane.ranks for lane in shown.lanes]) == (False, ["0-2"])
    assert [event.kind for event in shown.lanes[0].events] == ["compile", "calls"]


def test_what_a_sentinel_kept_of_a_rank_is_on_the_timeline(tmp_path: Path) -> None:
    run = write_run(tmp_path, [rank(0), rank(1, factor=3)])
    done = Did(kind=Kind.COLLECTIVE, name="all_reduce", number=1, group="tp", stack=(line(4),))
    waits = done.model_copy(update={"number": 2, "is_done": False})
    timed = TimedStream(stream=Stream(rank=1, events=(done, waits)), times=(101.0, 102.0), until=107.0)
    run.write_text("streams/rank_1.json", timed.to_json())
    run.write_text("rank_0/timeline.json", '[[100.0, "compile starts", "0/0"], [103.0, "compile ends", "0/0"]]')
    shown = seen(run.path)
    spans = {lane.ranks: [(one.kind, one.start, one.end) for one in lane.events] for lane in shown.lanes}
    assert shown.has_clock
    assert spans == {"0": [("compile", 0.0, 3.0)], "1": [("collective", 1.0, 2.0), ("collective", 2.0, 7.0)]}


def test_a_stream_that_was_tampered_with_is_refused_in_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, [rank(0), rank(1)])
    run.write_text("streams/rank_1.json", '{"stream": {}, "times": "now", "until": 0}')
    with pytest.raises(ConfigError, match="damaged"):
        seen(run.path)


def test_a_record_that_cannot_be_read_is_said_and_the_others_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, [rank(0), rank(1, factor=3)])
    run.write_text("rank_1/record.json", "{")
    shown = seen(run.path)
    assert [note for note in shown.notes if "rank_1" in note]
    assert next(layer for layer in shown.grid if layer.name == "graph").codes == (0, -1)


def test_logs_of_a_job_make_a_page_with_times_and_their_verdict() -> None:
    with examined([JOBS / "stride"]) as found:
        shown = view_of(evidence_of_logs(found, name="stride"))
        assert shown.outcome == "FAIL (exit 1)"
    assert (shown.has_clock, bool(shown.lanes), bool(shown.guards)) == (True, True, True)
    assert all(0 <= one.start <= one.end for lane in shown.lanes for one in lane.events)
    with gathered(JOBS / "graph_break", judge) as evidence:
        assert {one.kind for one in evidence.events[0]} == {"compile"}


def test_a_watched_run_is_its_logs_and_the_verdict_of_the_sentinel(tmp_path: Path) -> None:
    run = write_run(tmp_path, [rank(0), rank(1, factor=3)])
    (tmp_path / "trace").symlink_to(JOBS / "stride")
    with gathered(run.path, judge) as evidence:
        shown = view_of(evidence)
    assert (shown.command, evidence.verdict) == ("run", run.read_verdict())
    assert "num_threads" in [row.about for row in shown.environment]
    (tmp_path / "trace").unlink()
    (tmp_path / "trace").mkdir()
    with gathered(run.path, judge) as evidence:  # nothing was compiled
        assert [note for note in evidence.notes if "torch's logs" in note]


def test_a_thousand_records_are_digested_once_for_each_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested = []
    digest = of_run.digest_rank
    monkeypatch.setattr(of_run, "digest_rank", lambda record: digested.append(record.rank) or digest(record))
    run = big_run(tmp_path, 256, odd=37)
    verdict = run.read_verdict()
    assert verdict is not None
    shown = view_of(evidence_of_run(run, verdict))
    assert digested == [0, 37]
    graph = next(layer for layer in shown.grid if layer.name == "graph")
    assert [number for number, code in enumerate(graph.codes) if code] == [37]
    assert len(shown.lanes) <= 2


def test_tables_are_bounded_and_say_what_they_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MAX_GUARDS", 1)
    monkeypatch.setattr(view, "MAX_LANES", 1)
    monkeypatch.setattr(view, "MAX_EVENTS", 1)
    run = write_run(tmp_path, [rank(0), rank(1, factor=3)])
    verdict = run.read_verdict()
    assert verdict is not None
    did = {0: [Event("compile", "a", 0.0, 1.0), Event("calls", "b", 1.0, 2.0)], 1: [Event("compile", "c", 0.0, 1.0)]}
    shown = view_of(Evidence(verdict=verdict, command="gate", name="run", events=did))
    assert [(lane.ranks, len(lane.events), lane.num_left_out) for lane in shown.lanes] == [("0", 1, 1)]
    assert [note for note in shown.notes if "left out" in note]
    assert seen(run.path).num_guards_left_out > 0


def test_the_page_is_one_file_that_names_no_other_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    text = page(seen(write_run(tmp_path, [rank(0), rank(1, factor=3)]).path))
    read = _Read(text)
    assert {link[0] for link in read.links} <= {"#", "d"}  # data:
    assert {link[1:] for link in read.links if link.startswith("#")} <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))
    assert not {"link", "iframe", "img", "object"} & set(read.tags) - {"link"}
    styles_and_scripts = sum(
        len(part) for part in re.findall(r"<style>(.*?)</style>|<script>(.*?)</script>", text, re.S)[0]
    )
    assert styles_and_scripts < 50_000


def test_the_verdict_is_in_the_page_itself_not_only_in_its_data(tmp_path: Path) -> None:
    run = write_run(tmp_path, [rank(0), rank(1, factor=3)])
    verdict = run.read_verdict()
    assert verdict is not None and verdict.lead is not None
    text = re.sub(r"<script.*?</script>", "", page(seen(run.path)), flags=re.S)
    shown = _Read(text).text
    assert all(part in shown for part in (verdict.lead.says, verdict.lead.do_first, "FAIL (exit 1)"))


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """In a guard, a title and a place: none becomes an element, an attribute or the end of the script's data."""
    code = UserLine(file=f"/app/{HOSTILE}.py", line=3, function=HOSTILE, code=HOSTILE)
    bad = verdicts.failing().model_copy(update={"summary": HOSTILE, "preset": HOSTILE})
    lead = bad.lead and bad.lead.model_copy(update={"says": HOSTILE, "line": code})
    records = [rank(0, name=HOSTILE), rank(1, factor=3, name=HOSTILE)]
    run = write_run(tmp_path, records)
    found = evidence_of_run(run, bad.model_copy(update={"lead": lead}))
    text = page(view_of(found))
    read, harmless = _Read(text), _Read(page(seen(write_run(tmp_path / "x", [rank(0), rank(1, factor=3)]).path)))
    assert read.tags.count("script") == harmless.tags.count("script") == 2
    assert "img" not in read.tags and "onerror" not in read.attributes
    assert "49" not in re.findall(r"<p class=\"run\">.*?</p>", text, re.S)[0]
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[0])
    assert HOSTILE in json.dumps(data, ensure_ascii=False).replace('\\"', '"')


def test_a_source_is_shown_only_where_the_file_still_has_that_code(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("".join(f"x{number} = {number}\n" for number in range(1, 21)))
    at = UserLine(file=str(file), line=10, code="x10 = 10")
    shown = excerpt(at)
    assert shown is not None and (shown.first, len(shown.lines), shown.lines[4]) == (6, 9, "x10 = 10")
    edited = excerpt(at.model_copy(update={"line": 11}))
    assert edited is not None and edited.lines == ("x10 = 10",)
    secret = tmp_path / "secret.txt"
    secret.write_text("x10 = 10\nkey\n")
    other = excerpt(UserLine(file=str(secret), line=1, code="x10 = 10"))
    assert other is not None and other.lines == ("x10 = 10",)
    assert excerpt(None) is None


def test_a_listing_begins_near_the_first_difference_and_counts_what_it_leaves_out() -> None:
    def items(odd: int | None, number: int = 400) -> list[Item]:
        return [value_item(f"%{at}", "1" if at == odd else "0") for at in range(number)]

    shown = listing(items(None), items(300), ("rank 0", "rank 1"))
    assert shown is not None
    rows = [row for row in shown.rows if row is not None]
    assert (rows[0].number, [row.number for row in rows if row.differs], shown.rows[0]) == (295, [301], None)
    assert listing(items(None), items(None), ("rank 0", "rank 1")) is None
    missing = listing(items(None, 3), items(None, 5), ("rank 0", "rank 1"))
    assert missing is not None and [row.left for row in missing.rows if row is not None and row.differs] == [None, None]
    many = listing(items(None, 5000), [value_item(f"%{at}", "2") for at in range(5000)], ("rank 0", "rank 1"))
    assert many is not None and len(many.rows) <= 120 and many.num_left_out > 3000


def test_a_trace_has_a_process_for_each_rank_and_its_events_in_microseconds() -> None:
    did = {
        0: [Event("compile", "0/0 f", 10.0, 10.5, "why", line(3))],
        3: [Event("collective", "all_reduce", 11.0, 12.0)],
    }
    found = json.loads(trace(Evidence(verdict=verdicts.failing(), command="run", name="x", events=did)))["traceEvents"]
    spans = [(one["pid"], one["name"], one["ts"], one["dur"]) for one in found if one["ph"] == "X"]
    assert spans == [(0, "0/0 f", 0.0, 500_000.0), (3, "all_reduce", 1_000_000.0, 1_000_000.0)]
    assert [one["pid"] for one in found if one["name"] == "process_name"] == [0, 3]


def test_a_difference_is_listed_from_its_own_compile_not_from_one_whose_line_begins_alike(tmp_path: Path) -> None:
    """forward model.py:3 and forward model.py:30 with one compile id, as after a reset."""
    ranks = []
    for number in (0, 1):
        first = compiled(call("mul", "%0", str(2 + number)), reduce("%1"))
        second = compiled(call("add", "%0", str(7 + number)), reduce("%1"), line=line(30))
        ranks.append(record(number, first, second, domain="tp"))
    shown = seen(write_run(tmp_path, ranks).path)
    for difference in shown.differences:
        assert difference.listing is not None
        op = difference.title.partition("(")[0]
        assert all(op in str(row.left) for row in difference.listing.rows if row is not None and row.differs)
    assert {difference.title.partition("(")[0] for difference in shown.differences} == {"mul", "add"}


def write_tlparse(folder: Path, *, exit_code: int = 0) -> None:
    """A `tlparse` that writes an index of two ranks and nothing else, as 0.4.3 lays them out."""
    tool = folder / "tlparse"
    tool.write_text(
        "#!/bin/sh\n"
        'for last; do :; done\nout="$last"\n'
        'for rank in 0 1; do mkdir -p "$out/rank_$rank" && touch "$out/rank_$rank/index.html"; done\n'
        f"exit {exit_code}\n"
    )
    tool.chmod(0o755)


@pytest.mark.parametrize(("exit_code", "num_links"), [(0, 4), (1, 0)])
def test_the_pages_of_tlparse_are_linked_where_it_is_installed(
    exit_code: int, num_links: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, and each side of the difference; a tlparse that fails leaves the page without them."""
    write_tlparse(tmp_path, exit_code=exit_code)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with examined([JOBS / "reduce_op"]) as found:
        evidence = replace(evidence_of_logs(found, name="job"), logs=JOBS / "reduce_op")
    file = tmp_path / "report.html"
    write_page(evidence, file)
    links = [link for link in _Read(file.read_text()).links if "tlparse" in link]
    assert len(links) == num_links
    paths = [link.partition("#") for link in links]
    assert all((tmp_path / path).is_file() for path, _, _ in paths)
    assert {anchor for _, _, anchor in paths} <= {"", "[0/0]"}


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0, 1.0])
def test_ranks_whose_clocks_differ_stand_at_one_place(ahead_s: float, tmp_path: Path) -> None:
    """A second is how much later a busy rank may hear of the alarm: its clock is not moved."""
    run = RunDir.create(tmp_path)
    for number, shift_s in ((0, 0.0), (1, ahead_s)):
        times = [(100.0 + number, "compile starts"), (103.0 + number, "compile ends"), (104.0, "alarm")]
        entries = [[at_s + shift_s, what, "0/0" if "compile" in what else ""] for at_s, what in times]
        run.write_text(f"rank_{number}/timeline.json", json.dumps(entries))
    found = of_run.timed_events(run)
    moved_s = 0.0 if abs(ahead_s) > 5.0 else ahead_s
    assert [event.start for event in found[0]] == [100.0, 104.0]
    assert [event.start for event in found[1]] == [101.0 + moved_s, 104.0 + moved_s]
