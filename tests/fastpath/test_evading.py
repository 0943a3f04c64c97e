"""A fused kernel is refused by who registered it: ops under torch's names, replaced kernels, passes, backends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.evidence.samples import divergences
from tests.fastpath import banned, evading
from tests.gate.runs import run_many
from tpcompile.evidence.layers.environment import COMPILED_WITH, KERNEL_OF
from tpcompile.evidence.records import Check, CheckId, Layer, RankRecord, Verdict
from tpcompile.recording.additions import ALONE
from tpcompile.testing import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
HERE = r"evading\.py:\d+"
NAMED = {
    "aten fragment": ("aten::local_norm", HERE, "it is not registered as a fast path"),
    "inductor fragment": ("inductor::local_norm", HERE, "it is not registered as a fast path"),
    "overload": ("aten::rsqrt", HERE, "it is not registered as a fast path"),
    "custom op": ("quantized::fused_norm", f"{HERE} in fused_norm", "it is not registered as a fast path"),
    "overridden": ("aten::silu", HERE, "its kernel for CPU is not torch's"),
    "post-grad pass": ("tests.fastpath.evading.fuses_norms", f"{HERE} in fuses_norms", "post_grad_custom_post_pass"),
    "joint pass": ("tests.fastpath.evading.FusesNorms", f"{HERE} in FusesNorms", "joint_custom_pre_pass"),
    "fusion pass": ("tests.fastpath.evading.fuses_norms", HERE, "_post_fusion_custom_pass"),
    "passes in a list": ("tests.fastpath.evading.fuses_norms", HERE, "reorder_for_compute_comm_overlap_passes"),
    "own backend": ("tests.fastpath.evading.swaps_nodes", f"{HERE} in swaps_nodes", "the backend of torch.compile"),
    "own compiler": ("tests.fastpath.evading.compiles_forward", HERE, "the backend of torch.compile"),
    "allow_in_graph": ("tests.fastpath.evading.untraced", f"{HERE} in untraced", "nothing traced it"),
    "nonstrict_trace": ("tests.fastpath.evading.traced_leniently", HERE, "nothing traced it"),
}
"""Program -> what is refused, where it is defined or registered, and what else the report says of it."""
CALLED = {"aten fragment", "inductor fragment", "overload", "custom op", "allow_in_graph", "nonstrict_trace"}
"""Those that the graph calls: the line to blame is the call."""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    return banned.parsed(run_on_ranks(evading.verdicts, world_size=2, timeout_s=200))


@pytest.fixture(scope="module")
def records() -> dict[str, RankRecord]:
    """From a process of its own: this one may have ops and kernels of other tests."""
    (found,) = run_on_ranks(evading.records, world_size=1, timeout_s=200)
    return {name: RankRecord.model_validate_json(text) for name, text in found.items()}


def refusal(verdict: Verdict) -> Check:
    (check,) = (check for check in verdict.checks if check.id == CheckId.TP_AWARE)
    return check


def test_every_program_is_expected_to_be_named() -> None:
    assert NAMED.keys() == evading.EVADING.keys()


@pytest.mark.parametrize("program", NAMED)
def test_it_is_refused_by_name_with_the_file_that_made_it(records: dict[str, RankRecord], program: str) -> None:
    name, defined, says = NAMED[program]
    (found,) = records[program].refused_ops
    assert found.about == name and says in f"{found.notes['why']} {found.notes.get('how')}"
    assert re.search(defined, found.notes["defined"]) and found.line is not None
    if program in CALLED:
        assert "# the user's line" in found.line.code


@pytest.mark.parametrize("program", evading.ON_RANKS)
def test_check_is_red_by_name_and_tells_the_file(verdicts: dict[str, list[Verdict]], program: str) -> None:
    name, defined, says = NAMED[program]
    for verdict in verdicts[program]:
        check = refusal(verdict)
        assert (verdict.exit_code, check.is_red, check.observed) == (1, True, name)
        details = "\n".join(check.details)
        assert re.search(f"{re.escape(name)} [^,]*defined at [^,]*{defined}", details) and says in details, details


@pytest.mark.parametrize("program", evading.HEALTHY)
def test_what_torch_itself_registers_is_green(verdicts: dict[str, list[Verdict]], program: str) -> None:
    assert [(one.exit_code, refusal(one).observed) for one in verdicts[program]] == [(0, "none refused")] * 2


@pytest.mark.parametrize("program", evading.DECLARED)
def test_what_is_declared_is_green_and_printed(verdicts: dict[str, list[Verdict]], program: str) -> None:
    name, defined, _ = NAMED[program]
    for verdict in verdicts[f"{program} declared"]:
        check = refusal(verdict)
        assert (verdict.exit_code, check.observed) == (0, f"declared: {name}")
        (told,) = check.details
        assert re.match(rf"{re.escape(name)}: declared: .*, defined at [^,]*{defined}", told)


@pytest.mark.ranks
def test_the_gate_refuses_them(tmp_path: Path) -> None:
    hows = ("aten fragment", "post-grad pass", "overridden")  # the last stays for the rest of the process
    jobs = {
        how: {"target": "tests.fastpath.evading:build", "overrides": [f"how={how}"], "device": "cpu"} for how in hows
    }
    for how, run in run_many(tmp_path, jobs).items():
        (check,) = (check for check in run.judged.checks if check.id == CheckId.TP_AWARE)
        name, defined, _ = NAMED[how]
        assert run.exit_code == 1 and name in check.observed
        assert re.search(defined, "\n".join(check.details))


def test_ranks_that_compile_with_different_passes_differ_before_they_compile(records: dict[str, RankRecord]) -> None:
    """By the name of the pass, and by its source."""
    one = records["post-grad pass"]
    assert divergences(one, other_rank(one)) == ()
    plain = records["own backend"]
    (found,) = divergences(one, other_rank(one, {COMPILED_WITH: ALONE}))
    assert (found.layer, found.is_red) == (Layer.ENVIRONMENT, True)
    assert "compiled with" in found.title and "fuses_norms" in found.title
    (found,) = divergences(one, other_rank(one, {COMPILED_WITH: f"{dict(one.environment)[COMPILED_WITH]}0"}))
    assert found.layer == Layer.ENVIRONMENT
    assert dict(plain.environment)[COMPILED_WITH].startswith("tests.fastpath.evading.swaps_nodes ")


def test_ranks_with_different_kernels_for_an_op_of_torch_differ_before_they_compile(
    records: dict[str, RankRecord],
) -> None:
    one = records["overridden"]
    name = f"{KERNEL_OF}aten::silu (CPU)"
    assert dict(one.environment)[name].startswith("evading.py:")
    without = one.model_copy(update={"rank": 1, "environment": tuple(e for e in one.environment if e[0] != name)})
    (found,) = divergences(one, without)
    assert (found.layer, found.is_red) == (Layer.ENVIRONMENT, True) and name in found.title


def test_a_rank_that_compiles_nothing_is_told_by_that_alone(records: dict[str, RankRecord]) -> None:
    one = records["own backend"]
    idle = one.model_copy(update={"rank": 1, "environment": tuple(e for e in one.environment if e[0] != COMPILED_WITH)})
    assert not any(found.is_red for found in divergences(one, idle))


def other_rank(record: RankRecord, changed: dict[str, str] | None = None) -> RankRecord:
    """The same on rank 1, with some entries of its environment changed."""
    environment = dict(record.environment) | (changed or {})
    return record.model_copy(update={"rank": 1, "coordinate": 1, "environment": tuple(sorted(environment.items()))})
