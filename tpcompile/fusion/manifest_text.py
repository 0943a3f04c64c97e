"""Manifests and their differences -> text for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import at_text
from tpcompile.fusion.baseline import Outcome
from tpcompile.fusion.bisect import WORDS as TAKEN_OUT
from tpcompile.fusion.bisect import Attempt, Bisection
from tpcompile.fusion.diff import WORDS, Change, Diff, GraphDiff
from tpcompile.fusion.kinds import COLOURS, kind_of, label, ops_text, shortened, size_text
from tpcompile.fusion.manifest import total, total_before
from tpcompile.fusion.manifest_records import Decisions, GraphManifest, Launch, Manifest, Role, Totals
from tpcompile.fusion.why_not import Missed, missed_fusions

_BAR = 12
_REGISTERS = 12
_OPS = 40
_PLACES = 21
"""Columns; with the numbers before them, a launch has 100."""


def folded(line: Text, width: int) -> Iterator[Text]:
    """A line as it is printed on a terminal of that width: what is left of it below its beginning."""
    text = line.plain
    indent = len(text) - len(text.lstrip())
    rest = line[indent:]
    rest.end = ""
    console = Console(width=width)
    for part in rest.wrap(console, max(width - indent, 20)):
        part.rstrip()
        yield Text(" " * indent).append_text(part)


def manifest(found: Manifest, *, num_missed: int) -> Iterator[Text]:
    """All graphs, each with its launches in order and the fusions that would save most."""
    yield Text(f"torch {found.torch}, Triton {found.triton}, {found.device}, {len(found.graphs)} graphs")
    for graph in found.graphs:
        yield Text()
        yield from _graph(graph, num_missed, found.settings)


def _graph(graph: GraphManifest, num_missed: int, settings: Mapping[str, str]) -> Iterator[Text]:
    after = total(graph.launches)
    yield Text(f"graph {graph.compile_id or '-'} {graph.phase}: {_steps(graph, after)}", style="bold")
    decisions = graph.decisions
    if not graph.is_aligned:
        yield Text(f"  known by its code alone: {graph.why_not_aligned}", style="yellow")
    unseen = decisions.unseen if decisions else ()
    for name in unseen:
        yield Text(f"  not seen with this torch: {name}; reasons or scores are missing", style="yellow")
    yield from _launches(graph.launches)
    if decisions is not None and graph.is_aligned:
        yield from _inlining(graph, decisions)
    missed = missed_fusions(graph, settings)[:num_missed]
    if missed:
        yield Text("  not fused, by the bytes that one kernel would save:")
        for one in missed:
            yield from _missed(one)


def _launches(launches: Sequence[Launch]) -> Iterator[Text]:
    widest = max([one.bytes for one in launches], default=0)
    with_registers = any(one.resources for one in launches)
    for at, launch in enumerate(launches):
        if launch.role is Role.WAIT:
            continue
        yield _launch(at, launch, widest, with_registers=with_registers)
        for one in launch.resources:
            if one.spills:
                text = f"spills {one.spills} words of each thread to memory with {one.configuration}"
                yield Text(f"{'':16}{text}", style="red")


def _inlining(graph: GraphManifest, decisions: Decisions) -> Iterator[Text]:
    """A line for the ops that the same launches compute once more, and one for each buffer that a limit made."""
    place_of = {launch.node: str(at) for at, launch in enumerate(graph.launches)}
    by_nodes = grouped(decisions.recomputed, lambda one: one.nodes)
    for nodes in sorted(by_nodes):
        places = [place_of[node] for node in nodes]
        names = dict.fromkeys(one.op.removeprefix("aten.") for one in by_nodes[nodes])
        lines = chain.from_iterable(one.lines for one in by_nodes[nodes])
        text = f"{' '.join(names)}  {_places(dict.fromkeys(lines))}".rstrip()
        yield Text(f"  computed in {' and '.join(places)}: {text}")
    for made in decisions.realized:
        setting = f"  (config.{made.setting})" if made.setting else ""
        yield Text(f"  {made.buffer} is in memory because of its {made.text}{setting}")


def _steps(graph: GraphManifest, after: Totals) -> str:
    decisions = graph.decisions
    if decisions is None:
        return f"{after.kernels} launches"
    before, ops = total_before(decisions), decisions.ops
    kernels = f"{ops.kernels} ops -> {before.kernels} nodes -> {after.kernels} launches"
    moved = " -> ".join(map(size_text, (ops.bytes, before.bytes, after.bytes)))
    written_before = {name for one in decisions.before for name in one.writes}
    in_registers = written_before.difference(*(one.writes for one in decisions.after))
    return f"{kernels}, {moved}, {len(in_registers)} buffers kept in registers"


def _launch(at: int, launch: Launch, widest: int, *, with_registers: bool) -> Text:
    share = launch.bytes / widest if widest else 0
    line = Text(f"{at:4} {label(launch):>10} {size_text(launch.bytes):>8} ")
    line.append(f"{'█' * max(1, round(share * _BAR)):<{_BAR}} ", style=COLOURS[kind_of(launch)][0])
    width = _OPS
    if with_registers:
        registers = sorted({one.registers for one in launch.resources})
        ends = map(str, dict.fromkeys((*registers[:1], *registers[-1:])))
        text = f"{'-'.join(ends)} regs" if registers else ""  # 18-55 where autotuning would choose
        line.append(f"{text:<{_REGISTERS}} ")
        width -= _REGISTERS + 1
    line.append(f"{ops_text(launch, width):<{width}} {shortened(_places(launch.lines), _PLACES)}")
    line.rstrip()
    return line


def _places(lines: Iterable[UserLine]) -> str:
    """The file and line of each, `model.py:5,7`."""
    numbers: dict[str, list[int]] = {}
    for line in lines:
        numbers.setdefault(Path(line.file).name, []).append(line.line)
    return " ".join(f"{file}:{','.join(map(str, sorted(found)))}" for file, found in numbers.items())


def _missed(one: Missed) -> Iterator[Text]:
    at, then = one.places
    yield Text(f"{at:4} + {then}: {size_text(one.saved_bytes)}, {one.reason.boundary}: {one.reason.text}")
    if one.reason.remedy:
        yield Text(f"         try: {one.reason.remedy}", style="dim")


def pair(one: Missed) -> Iterator[Text]:
    """All that is known of two launches."""
    yield from _missed(one)
    yield Text(f"         shared: {', '.join(one.shared)}")
    if one.score:
        yield Text(f"         score: {', '.join(f'{name} {value}' for name, value in one.score.items())}")
    for text in one.logged:
        yield Text(f"         Inductor: {text}")
    for line in one.lines:
        yield Text(f"         {line}: {line.code}")


def outcome(found: Outcome, path: Path) -> Iterator[Text]:
    """A manifest against the baseline in a file."""
    for one in found.regressions:
        yield Text(f"{one.says}{at_text(one.line)}", style="red")
        yield from (Text(f"    {reason}") for reason in one.reasons)
    if found.better is not None:
        yield Text(f"better than the baseline, which is tightened: commit {path}", style="green")
    elif not found.is_worse:
        yield Text("as in the baseline")


def difference(found: Diff) -> Iterator[Text]:
    """What differs, the class of the change first."""
    words = WORDS[found.change]
    yield Text(words) if found.change is Change.NONE else Text(f"{found.change}: {words}", style="bold")
    for name in found.missing:
        yield Text(f"- graph {name}", style="red")
    for name in found.new:
        yield Text(f"+ graph {name}", style="green")
    for graph in found.graphs:
        yield from _graph_diff(graph)
    for text in found.tuned:
        yield Text(f"  same code, chosen differently by timing: {text}", style="dim")


def _graph_diff(graph: GraphDiff) -> Iterator[Text]:
    yield Text(f"graph {graph.graph}: {graph.added_bytes:+,} bytes")
    for sign, style, launches in (("-", "red", graph.removed), ("+", "green", graph.added)):
        for launch in launches:
            yield Text(
                f"  {sign} {label(launch)} {ops_text(launch, _OPS)}  {_places(launch.lines)}".rstrip(), style=style
            )
    for split in graph.splits:
        yield Text(f"  {split.was} is {len(split.now)} kernels now: {', '.join(split.now)}")
        for one in split.why:
            logged = f" (Inductor: {one.logged[-1]})" if one.logged else ""
            yield Text(f"    {one.first} and {one.second}: {one.reason.text}{logged}")
            if one.reason.remedy:
                yield Text(f"    try: {one.reason.remedy}", style="dim")
    for name in graph.recoded:
        yield Text(f"  different code: {name}")


def bisection(found: Bisection) -> Iterator[Text]:
    """What helps first, then what was tried in vain."""
    yield Text(f"as it is: {_kernels(found.as_it_is)}", style="bold")
    helping = list(filter(found.helps, found.attempts))
    for attempt in sorted(helping, key=found.fewer_kernels, reverse=True):
        assert attempt.now is not None, "what helps was compiled"
        fewer = found.fewer_kernels(attempt)
        gain = f"{fewer} fewer" if fewer else "fewer bytes"
        yield Text(f"without {attempt.kind}: {_kernels(attempt.now)}, {gain}: {TAKEN_OUT[attempt.kind]}", style="green")
        for one in dict.fromkeys(attempt.taken_out):
            yield Text(f"    {one.op.removeprefix('aten.')}  {_places(one.lines)}".rstrip())
    if not helping:
        yield Text("no kind of op that was taken out keeps kernels apart")
    yield from _in_vain(found, [attempt for attempt in found.attempts if attempt not in helping])
    yield Text("for a test only: what a program without these ops computes is wrong", style="dim")


def _in_vain(found: Bisection, others: Iterable[Attempt]) -> Iterator[Text]:
    tried, absent, failed = [], [], []
    for one in others:
        if one.failed:
            failed.append(f"could not be compiled without {one.kind}: {one.failed}")
        elif one.now is None:
            absent.append(str(one.kind))
        else:
            more = -found.fewer_kernels(one)
            tried.append(f"{one.kind} ({more} more)" if more > 0 else f"{one.kind} (as many kernels)")
    if tried:
        yield Text(f"taken out in vain: {', '.join(tried)}")
    if absent:
        yield Text(f"not in this program: {', '.join(absent)}")
    for text in failed:
        yield Text(text, style="yellow")


def _kernels(totals: Totals) -> str:
    return f"{totals.kernels} launches, {size_text(totals.bytes)}"
