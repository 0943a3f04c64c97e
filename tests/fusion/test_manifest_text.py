"""What a terminal of 100 columns shows of many launches with long names."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from tests.forked import run_python
from tests.fusion import samples
from tpcompile.fusion import kinds, manifest_text
from tpcompile.fusion import manifest as manifests
from tpcompile.fusion.kinds import Kind
from tpcompile.fusion.manifest_records import Call, Launch, Manifest, Role

MANY = samples.manifest(samples.graph(120))
WIDTH = 100


def lines_of(manifest: Manifest) -> list[Text]:
    return list(manifest_text.manifest(manifest, num_missed=3))


def launched(manifest: Manifest) -> list[str]:
    return [line.plain for line in lines_of(manifest) if "█" in line.plain]


def with_resources(*registers: int, spills: int = 0) -> Manifest:
    needs = tuple(samples.resources(number, spills) for number in registers)
    launches = (samples.launch(samples.NORM, 0, resources=needs), samples.launch(samples.MATMUL, 1))
    return samples.manifest(samples.graph(2).model_copy(update={"launches": launches}))


def on_a_terminal(lines: list[Text]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=WIDTH, color_system="standard")
    for line in lines:
        for part in manifest_text.folded(line, WIDTH):
            console.print(part, soft_wrap=True)
    return out.getvalue()


@pytest.mark.parametrize("manifest", [MANY, with_resources(18, 255)], ids=["120 launches", "with registers"])
def test_no_launch_is_wider_than_100_columns(manifest: Manifest) -> None:
    widths = [len(line) for line in launched(manifest)]
    assert widths
    assert max(widths) <= WIDTH


def test_every_launch_but_a_wait_has_its_number(tmp_path: Path) -> None:
    numbers = [int(line.split()[0]) for line in launched(MANY)]
    waits = [at for at, one in enumerate(MANY.graphs[0].launches) if one.role is Role.WAIT]
    assert sorted(numbers + waits) == list(range(120))


def test_ops_that_do_not_fit_are_counted() -> None:
    first = launched(MANY)[0]
    assert "an_operator_with_a_long_name_0 +11" in first
    assert "a_long_name_of_a_m..." in first


@pytest.mark.parametrize(
    ("ops", "width", "text"),
    [
        (("aten.add", "aten.mul"), 40, "add mul"),
        (("aten.add", "aten.mul", "aten.sum"), 8, "add +2"),
        (("_c10d_functional.all_reduce",), 40, "all_reduce"),
        (("a_name_of_one_op",), 8, "a_nam..."),
        ((), 40, "triton_poi_fused_mul_silu_1"),
    ],
)
def test_ops_as_text(ops: tuple[str, ...], width: int, text: str) -> None:
    assert kinds.ops_text(samples.launch(samples.ACTIVATION, 0, ops=ops), width) == text


def test_registers_are_shown_where_they_are_known_and_spills_below() -> None:
    text = [line.plain for line in lines_of(with_resources(18, 55, spills=6))]
    assert any("18-55 regs" in line for line in text)
    assert any("spills 6 words" in line and "XBLOCK=1 num_warps=8" in line for line in text)
    assert not any("regs" in line for line in launched(MANY))
    assert any(" 40 regs " in line for line in launched(with_resources(40)))


def test_a_long_line_goes_on_below_its_beginning() -> None:
    line = Text("   0 + 1: " + "word " * 30, style="dim")
    parts = [part.plain for part in manifest_text.folded(line, 60)]
    assert len(parts) == 3
    assert all(part.startswith("   ") and len(part) <= 60 for part in parts)
    assert " ".join(" ".join(parts).split()) == line.plain.strip()


def test_a_terminal_has_a_colour_for_each_kind_and_no_line_wider_than_itself() -> None:
    shown = on_a_terminal(lines_of(MANY))
    assert all(f"\x1b[{code}m█" in shown for code in (31, 32, 33, 34, 35, 36))
    plain = Text.from_ansi(shown).plain
    assert max(map(len, plain.splitlines())) <= WIDTH
    assert max(len(line) for line in lines_of(MANY)) > WIDTH  # the first line of the graph was folded


def test_every_kind_has_its_own_colour() -> None:
    assert set(kinds.COLOURS) == set(Kind)
    for colors in zip(*kinds.COLOURS.values(), strict=True):
        assert len(set(colors)) == len(Kind)


@pytest.mark.parametrize("role", Role)
def test_every_role_has_a_kind(role: Role) -> None:
    call = Call(role=role, name="any", kind="unk")
    assert kinds.kind_of(Launch(**call.model_dump())) in Kind


@pytest.mark.slow
@pytest.mark.ranks
def test_the_command_in_a_pipe_prints_no_colour_and_folds_nothing(tmp_path: Path) -> None:
    manifests.write(MANY, tmp_path / "manifest.json")
    ended = run_python(["-m", "tpcompile.fusion", "show", tmp_path / "manifest.json", "--missed", "3"])
    assert ended.returncode == 0, ended.stderr
    assert "\x1b" not in ended.stdout
    assert len(ended.stdout.splitlines()) == len(lines_of(MANY))
