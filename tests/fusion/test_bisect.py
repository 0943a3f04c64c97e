"""One kind of op after the other is taken out: the one that keeps kernels apart is named, with the user's line."""

from __future__ import annotations

import json
import re

import pytest

from tests.forked import run_python
from tpcompile.errors import ConfigError
from tpcompile.evidence.records import UserLine
from tpcompile.fusion import manifest_text
from tpcompile.fusion.bisect import Attempt, Bisection, Kind, TakenOut
from tpcompile.fusion.manifest_records import Totals

PROGRAMS = "tests.fusion.kept_apart"


def bisected(name: str, kinds: tuple[Kind, ...]) -> Bisection:
    from tpcompile.fusion import attempts, targets

    return attempts.bisect(
        lambda variant: targets.record_variant(f"{PROGRAMS}:{name}", (), variant, nproc=2, device="cpu"), kinds
    )


def text(found: Bisection) -> list[str]:
    return [line.plain for line in manifest_text.bisection(found)]


KEEPS_APART = {
    "transposed": (Kind.TRANSPOSES, "permute", "x.t().contiguous()"),
    "gathered": (Kind.COLLECTIVES, "all_gather_into_tensor", "all_gather_tensor"),
    "scattered": (Kind.COLLECTIVES, "reduce_scatter_tensor", "reduce_scatter_tensor"),
    "custom": (Kind.CUSTOM, "doubled", "doubled(x.sin())"),
    "custom_in_place": (Kind.CUSTOM, "add_to", "add_to(z, y)"),
    "into_an_input": (Kind.COPIES, "copy_", "x.copy_"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPS_APART)
def test_the_op_that_keeps_kernels_apart_is_named_with_its_line(name: str, fresh_compiler: None) -> None:
    kind, op, code = KEEPS_APART[name]
    found = bisected(name, (kind,))
    (attempt,) = found.attempts
    assert found.helps(attempt)
    assert found.fewer_kernels(attempt) == 1
    first = attempt.taken_out[0]
    assert op in first.op
    assert code in first.lines[0].code


@pytest.mark.slow
def test_a_size_that_is_marked_as_dynamic_is_made_a_constant(fresh_compiler: None) -> None:
    found = bisected("dynamic", (Kind.SHAPES,))
    assert found.fewer_kernels(found.attempts[0]) == 1


@pytest.mark.slow
def test_as_many_kernels_that_move_fewer_bytes_are_a_gain(fresh_compiler: None) -> None:
    found = bisected("cast", (Kind.CASTS,))
    assert found.fewer_kernels(found.attempts[0]) == 0
    assert found.helps(found.attempts[0])
    assert any("fewer bytes" in line for line in text(found))


@pytest.mark.slow
def test_an_op_that_is_run_for_what_it_does_is_taken_out_and_its_own_launch_is_no_gain(fresh_compiler: None) -> None:
    found = bisected("printed", (Kind.EFFECTS,))
    (attempt,) = found.attempts
    assert [one.op for one in attempt.taken_out] == ["tpcompile_kept_apart.logged"]
    assert attempt.now is not None
    assert attempt.now.kernels == found.as_it_is.kernels - 1
    assert not found.helps(attempt)


@pytest.mark.slow
def test_a_program_of_one_kernel_has_nothing_that_helps_and_says_so(fresh_compiler: None) -> None:
    found = bisected("one_kernel", tuple(Kind))
    assert not any(map(found.helps, found.attempts))
    assert any(line.endswith(f"this program: {', '.join(Kind)}") for line in text(found))


@pytest.mark.slow
def test_what_runs_is_the_program_as_it_is(fresh_compiler: None) -> None:
    import torch

    from tpcompile.fusion.rewrites import RewritingPass, without_casts
    from tpcompile.torch_api.generated import generating_backend, uncompiled_kernels

    rewriting = RewritingPass(without_casts)
    x = torch.randn(8, 8)
    with uncompiled_kernels():
        y = torch.compile(lambda x: x.double().sin().float(), backend=generating_backend(rewriting))(x)
    assert len(rewriting.found) == 2
    assert torch.equal(y, x.double().sin().float())


@pytest.mark.slow
def test_a_program_that_is_compiled_already_is_refused(fresh_compiler: None) -> None:
    with pytest.raises(ConfigError, match="compiled already"):
        bisected("compiled_already", ())


@pytest.mark.slow
@pytest.mark.ranks
def test_the_command_prints_the_op_and_that_it_is_for_a_test_only() -> None:
    arguments = ["-m", "tpcompile", "fusion", "bisect", f"{PROGRAMS}:gathered", "--nproc", "2", "--device", "cpu"]
    ended = run_python(arguments)
    assert ended.returncode == 0, ended.stderr
    assert "collectives: 1 launches, 49.2 kB, 1 fewer" in ended.stdout
    assert "_c10d_functional.all_gather_into_tensor  kept_apart.py:" in ended.stdout


# Judgement alone


def attempt(kind: Kind, kernels: int, *, moved: int = 100, number: int = 1) -> Attempt:
    line = UserLine(file="model.py", line=7, code="y = f(x)")
    taken = (TakenOut(op="aten.f", lines=(line,)),) * number
    return Attempt(kind=kind, taken_out=taken, now=Totals(kernels=kernels, bytes=moved))


def of(*attempts: Attempt) -> Bisection:
    return Bisection(as_it_is=Totals(kernels=5, bytes=100), attempts=attempts)


@pytest.mark.parametrize(
    ("made", "fewer", "helps"),
    [
        (attempt(Kind.CASTS, 4), 1, True),
        (attempt(Kind.CASTS, 5), 0, False),
        (attempt(Kind.CASTS, 6), -1, False),
        (attempt(Kind.CASTS, 5, moved=90), 0, True),
        (attempt(Kind.COLLECTIVES, 3, number=2), 0, False),  # the two collectives themselves
        (attempt(Kind.COLLECTIVES, 3, moved=10, number=2), 0, False),
        (attempt(Kind.COLLECTIVES, 2, number=2), 1, True),
        (Attempt(kind=Kind.CASTS), 0, False),
        (Attempt(kind=Kind.CASTS, failed="TypeError: no"), 0, False),
    ],
)
def test_only_launches_besides_those_of_the_ops_themselves_are_a_gain(made: Attempt, fewer: int, helps: bool) -> None:
    found = of(made)
    assert (found.fewer_kernels(made), found.helps(made)) == (fewer, helps)


def test_what_could_not_be_compiled_is_said() -> None:
    lines = text(of(Attempt(kind=Kind.CASTS, failed="TypeError: no")))
    assert any(line.endswith("casts: TypeError: no") for line in lines)


def test_what_was_taken_out_in_vain_is_said_with_what_became_of_the_kernels() -> None:
    lines = text(of(attempt(Kind.CASTS, 5), attempt(Kind.LAYOUTS, 7)))
    assert any(re.search(r"casts \(.*\), layouts \(2 more\)$", line) for line in lines)


def test_each_op_is_listed_once_and_the_largest_gain_first() -> None:
    lines = text(of(attempt(Kind.CASTS, 4, number=3), attempt(Kind.TRANSPOSES, 2)))
    assert [line for line in lines if line.startswith("    ")] == ["    f  model.py:7"] * 2
    assert "transposes: 2 launches, 100 B, 3 fewer" in lines[1]


def test_a_bisection_is_json() -> None:
    found = of(attempt(Kind.CASTS, 4))
    assert Bisection.model_validate(json.loads(json.dumps(found.model_dump(mode="json")))) == found
