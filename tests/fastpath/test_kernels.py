"""The fast paths that ship: certified for this source, proved again on two ranks, clear on bad input."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forked import run_python
from tpcompile.errors import FastPathError
from tpcompile.evidence.records import value_item
from tpcompile.fastpath import ban, certificate, plain, registered, tp_region
from tpcompile.fastpath.certificate import Kind
from tpcompile.fastpath.kernels.all import activation, linear_gelu, qk_head_norm, qk_norm, qkv_pack, token_norm
from tpcompile.fastpath.use import Use
from tpcompile.testing import run_on_ranks

CERTIFIED = ("qk_norm_rope", "qk_head_norm_rope", "add_rms_norm", "add_modulated_norm", "gelu_tanh", "silu_mul")
EXCHANGED = ("qk_norm_rope_exchange", "all_reduce_add_rms_norm")
LIBRARY = ("linear_gelu_tanh",)
"""Calls of a library, which launch no Triton kernel."""
FEW_ROWS = ("few_rows_linear", "few_rows_linear_gelu")
"""A kernel in Gluon, for which the interpreter runs a plain one."""
TABLES = {"cos_SR": torch.ones(3, 8), "sin_SR": torch.zeros(3, 8)}


@pytest.mark.parametrize("name", CERTIFIED + EXCHANGED)
def test_it_is_certified_for_its_source_and_its_cases_see_mistakes(name: str) -> None:
    path = registered()[name]
    for tp in (2, 4, 8):
        assert certificate.uncertified(path, tp=tp) == ""
    (proved,) = (one for one in certificate.certificates_of(path) if one.device == "interpreter")
    assert (proved.tp_sizes, proved.dtypes) == ((1, 2, 4, 8), ("float32", "bfloat16", "float16"))
    power = proved.power
    assert power.num_wrong >= 20 and power.caught >= 0.95 and power.caught_of_reached == 1.0
    assert all(survivor.reason for survivor in power.survivors) and proved.launches_kernels


def proved_for_half_precision(name: str) -> certificate.Certificate:
    """The interpreter's certificate, which counts for 2, 4 and 8 ranks."""
    path = registered()[name]
    for tp in (2, 4, 8):
        assert certificate.uncertified(path, tp=tp) == ""
    (proved,) = (one for one in certificate.certificates_of(path) if one.device == "interpreter")
    assert (proved.tp_sizes, proved.dtypes) == ((1, 2, 4, 8), ("bfloat16", "float16"))
    return proved


@pytest.mark.parametrize("name", LIBRARY)
def test_a_library_call_is_certified_with_every_mutation_caught_that_the_cases_reach(name: str) -> None:
    proved = proved_for_half_precision(name)
    power = proved.power
    assert power.num_reached >= 10 and power.caught_of_reached == 1.0
    assert all(survivor.reason for survivor in power.survivors) and not proved.launches_kernels


@pytest.mark.parametrize("name", FEW_ROWS)
def test_products_of_few_rows_are_certified_by_the_kernel_that_the_interpreter_runs(name: str) -> None:
    proved = proved_for_half_precision(name)
    power = proved.power
    assert power.num_wrong >= 20 and power.caught >= 0.95 and power.caught_of_reached == 1.0
    mutated = {(survivor.kind, survivor.change.partition("[")[0]) for survivor in power.survivors}
    assert {change for kind, change in mutated if kind == Kind.UNREACHED} == {"few_rows_kernel"}


@pytest.mark.parametrize("name", CERTIFIED + EXCHANGED + LIBRARY + FEW_ROWS)
def test_what_its_certificate_of_a_gpu_says_of_its_power_is_what_the_interpreter_found(name: str) -> None:
    made = certificate.certificates_of(registered()[name])
    assert {one.device for one in made} == {"interpreter", "sm90"}
    assert len({one.power for one in made}) == 1 and len({one.source for one in made}) == 1


ROOT = Path(__file__).resolve().parents[2]
PROVE = """
import tests.fastpath.shipped
from tpcompile.fastpath.certify import certify
for name in NAMES:
    proved = certify(name, tp_sizes=(2,), num_mutations=2)
    print(name, proved.power.caught_of_reached, sep=": ")
"""


@pytest.mark.slow
def test_on_two_ranks_they_are_proved_again_in_the_interpreter(tmp_path: Path) -> None:
    program = tmp_path / "prove.py"
    program.write_text(PROVE.replace("NAMES", repr(CERTIFIED + LIBRARY)))
    done = run_python([program], environ={**os.environ, "TRITON_INTERPRET": "1"}, timeout_s=280)
    assert done.stdout.splitlines() == [f"{name}: 1.0" for name in CERTIFIED + LIBRARY], done.stdout + done.stderr


@pytest.mark.slow
def test_the_script_has_the_cases_of_a_fast_path_that_ships() -> None:
    done = run_python([ROOT / "scripts" / "certify_shipped.py", "silu_mul", "--tp", "2", "--mutations", "2"])
    assert done.stdout.startswith("silu_mul: 9 cases,"), done.stderr
    assert (done.returncode, done.left_running) == (1, ())  # so few mutations make no certificate


def test_the_single_gpu_kernel_is_refused_on_shards_only() -> None:
    why = ban.refusal(Use(value_item("tpcompile::qkv_pack", "in the dynamo graph")), ())
    assert re.search(" qkv_pack_rmsnorm_rope .*tp=none, at ", why)
    arguments = (torch.ones(1, 3, 48), torch.ones(16), torch.ones(16), *TABLES.values())
    with tp_region(2), pytest.raises(FastPathError, match=r"qkv_pack_rmsnorm_rope .*tp=none.*; call qkv_pack "):
        qkv_pack.qkv_pack_rmsnorm_rope(*arguments, eps=1e-6)


def test_the_product_with_gelu_runs_without_a_gpu_and_has_no_backward() -> None:
    x, weight, bias = (one.bfloat16() for one in (torch.randn(2, 3, 8), torch.randn(6, 8), torch.linspace(-4, 4, 6)))
    expected = plain.linear_gelu_tanh(x, weight, bias)
    compiled = torch.compile(linear_gelu.linear_gelu_tanh, backend="aot_eager", fullgraph=True)
    for call in (linear_gelu.linear_gelu_tanh, compiled):
        torch.testing.assert_close(call(x, weight, bias), expected)
    with pytest.raises(RuntimeError, match="autograd"):
        linear_gelu.linear_gelu_tanh(x, weight.requires_grad_(), bias).sum().backward()


def few_rows_errors() -> list[float]:
    """In an interpreting process: how far a product of few rows is from float64, and with two rows exchanged."""
    from tpcompile.fastpath.kernels.few_rows import few_rows_linear
    from tpcompile.torch_api import interpreted

    interpreted.like_gpus()
    x, weight, bias = (torch.randn(shape) for shape in ((2, 4, 768), (128, 768), (128,)))
    x, weight, bias = x.bfloat16(), (weight / 28).bfloat16(), bias.bfloat16()
    expected = plain.few_rows_linear(x.double(), weight.double(), bias.double(), gelu=True)
    exchanged = x.index_select(1, torch.tensor([1, 0, 2, 3]))
    found = [few_rows_linear(each, weight, bias, gelu=True).double() for each in (x, exchanged)]
    return [((each - expected).norm() / expected.norm()).item() for each in found]


def test_a_product_of_few_rows_is_as_exact_as_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ((right, wrong),) = run_on_ranks(few_rows_errors, world_size=1, timeout_s=200)
    assert right < 4e-3 < 0.1 < wrong


def qk(size: int = 32, **changes: Any) -> dict[str, Any]:
    arguments = {
        "q_BSd": torch.ones(1, 3, size), "k_BSc": torch.ones(1, 3, 16), "q_weight_d": torch.ones(size),
        "k_weight_c": torch.ones(16), **TABLES, "counts": (32, 16), "eps": 1e-6,
    }  # fmt: skip
    return arguments | changes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qk_norm.qk_norm_rope(**qk()), "q_BSd is on the CPU; move it to a GPU, or set TRITON_INTERPRET=1"),
        (
            lambda: qk_norm.qk_norm_rope(**qk(q_BSd=torch.ones(1, 3, 32, dtype=torch.float64))),
            "fast path qk_norm_rope: q_BSd is float64; it takes float32, bfloat16, float16",
        ),
        (
            lambda: qk_norm.qk_sums(torch.ones(1, 32, 3).transpose(1, 2), torch.ones(1, 3, 16)),
            r"qk_sums: q has stride 3 in its last dim; pass q.contiguous\(\)",
        ),
        (
            lambda: apply(q_width=24),
            "qk_apply: q is 24 wide, no multiple of the head size 16 of the rotary tables",
        ),
        (
            lambda: apply(q_weight=torch.ones(64)),
            r"qk_apply: q is 32 wide and its weight \[64\]; pass this rank's slice",
        ),
        (
            lambda: apply(cos=torch.ones(4, 8)),
            r"qk_apply: q has 3 tokens; cos and sin are \[4, 8\] and \[3, 8\]",
        ),
        (
            lambda: qk_head_norm.qk_head_norm(
                torch.ones(1, 3, 32),
                torch.ones(1, 3, 16),
                torch.ones(32),
                torch.ones(16),
                *TABLES.values(),
                1e-6,
                False,
            ),
            r"qk_head_norm: q is 32 wide and its weight \[32\]; pass one head of 16",
        ),
        (
            lambda: token_norm.add_norm(torch.ones(2, 4), torch.ones(2, 3), torch.ones(4), 1e-6),
            r"add_norm: branch is \[2, 3\], and \[2, 4\] is needed",
        ),
        (
            lambda: token_norm.modulated_norm(*(torch.ones(2, 3, 4),) * 2, *(torch.ones(1, 4),) * 3, 1e-6),
            r"modulated_norm: gate is \[1, 4\], and \[2, 4\] is needed",
        ),
        (
            lambda: activation.silu_mul_op(torch.ones(2, 4), torch.ones(2, 3)),
            r"silu_mul: gate is \[2, 4\] and up \[2, 3\]; they must be equal",
        ),
        (
            lambda: linear_gelu.linear_gelu(torch.ones(2, 4), torch.ones(3, 4), torch.ones(1)),
            r"linear_gelu: x is 4 wide, weight and bias are \[3, 4\] and \[1\]; \[f, 4\] and \[f\] are needed",
        ),
        (
            lambda: linear_gelu.linear_gelu(torch.ones(2, 4), torch.ones(3, 4).bfloat16(), torch.ones(3)),
            "linear_gelu: tensors are torch.bfloat16, torch.float32; all must be float32, bfloat16 or float16",
        ),
    ],
    ids=[
        "CPU",
        "dtype",
        "stride",
        "width",
        "weight",
        "tables",
        "head weight",
        "branch",
        "modulation",
        "gate and up",
        "one bias",
        "weight dtype",
    ],
)
def test_bad_input_is_one_line_before_a_launch(
    call: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CPU" not in message:
        monkeypatch.setattr("tpcompile.fastpath.kernels.op.is_interpreted", lambda: True)
    with pytest.raises(FastPathError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def apply(q_width: int = 32, cos: Tensor = TABLES["cos_SR"], q_weight: Tensor | None = None) -> Any:
    q_weight = torch.ones(q_width) if q_weight is None else q_weight
    q, k, sums = torch.ones(1, 3, q_width), torch.ones(1, 3, 16), torch.ones(1, 3, 2)
    return qk_norm.qk_apply(q, k, sums, q_weight, torch.ones(16), cos, TABLES["sin_SR"], 32, 16, 1e-6, False)


def checked_ops() -> int:
    """In an interpreting process: schema, fake, autograd of every op; compiled code with a length that changes."""
    from tpcompile.fastpath.kernels.all import (
        activation,
        few_rows,
        linear_gelu,
        qk_head_norm,
        qk_norm,
        qkv_pack,
        token_norm,
    )
    from tpcompile.torch_api import interpreted

    interpreted.like_gpus()
    x = torch.randn(2, 3, 32)
    ops: list[tuple[Any, tuple[Any, ...]]] = [
        (qk_norm.qk_sums, (x, x)),
        (
            qk_norm.qk_apply,
            (x, x, torch.ones(2, 3, 2), torch.ones(32), torch.ones(32), *TABLES.values(), 32, 32, 1e-6, False),
        ),
        (qk_head_norm.qk_head_norm, (x, x, torch.ones(16), torch.ones(16), *TABLES.values(), 1e-6, True)),
        (token_norm.add_norm, (x, x, torch.ones(32), 1e-6)),
        (token_norm.modulated_norm, (x, x, *(torch.ones(2, 32),) * 3, 1e-6)),
        (activation.gelu, (x,)),
        (activation.silu_mul_op, x.chunk(2, -1)),
        (qkv_pack.qkv_pack, (x, x, torch.ones(32), torch.ones(32), *TABLES.values(), 1e-6, False)),
    ]
    for op, arguments in ops:
        tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
        leaves = [each.clone().requires_grad_() if isinstance(each, Tensor) else each for each in arguments]
        torch.library.opcheck(op, tuple(leaves), test_utils=tests)
    forward = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(linear_gelu.linear_gelu, (x, torch.ones(4, 32), torch.ones(4)), test_utils=forward)
    few = tuple(torch.randn(shape).bfloat16() for shape in ((2, 3, 768), (64, 768), (64,)))
    torch.library.opcheck(few_rows.few_rows, (*few, True), test_utils=forward[:2])
    return len(ops)


def test_ops_keep_what_torch_asks_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_on_ranks(checked_ops, world_size=1, timeout_s=200) == [8]
