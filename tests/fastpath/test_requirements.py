"""A call in eager with arguments that a fast path cannot take is one clear error, and nothing is launched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.fastpath import kernels
from tpcompile.errors import ConfigError, FastPathError
from tpcompile.fastpath import fast_path, registered, registry
from tpcompile.fastpath.declare import requirements

LAUNCHED: list[Tensor] = []


@pytest.fixture(autouse=True)
def no_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    LAUNCHED.clear()


def plain_norm(x: Tensor, heads: int = 1) -> Tensor:
    return x


def launch(x: Tensor, heads: int = 1) -> Tensor:
    LAUNCHED.append(x)
    return x


def declared(**assumed: Any) -> Callable[..., Tensor]:
    return fast_path("norm", replaces=plain_norm, tp="per_head", **assumed)(launch)


@pytest.mark.parametrize(
    ("assumed", "args", "why"),
    [
        (
            {"contiguous": ("x",)},
            (torch.ones(4, 2).t(),),
            r"x .*\(2, 4\) .*strides \(1, 2\); .*x\.contiguous\(\)",
        ),
        (
            {"divisible": {"x": 8}},
            (torch.ones(2, 12),),
            r".*last dim .*x .*12, .* 8; .*plain_norm",
        ),
        ({"divisible": {"heads": 4}}, (torch.ones(2), 6), r"heads .*6, .* 4; .*plain_norm"),
        (
            {"dtypes": (torch.bfloat16, torch.float16)},
            (torch.ones(2),),
            r"x .*float32; .* bfloat16, float16",
        ),
    ],
    ids=["contiguous", "divisible last dim", "divisible number", "dtypes"],
)
def test_what_it_cannot_take_is_refused_before_the_launch(
    assumed: dict[str, Any], args: tuple[Any, ...], why: str
) -> None:
    with pytest.raises(FastPathError, match=f" norm: {why}"):
        declared(**assumed)(*args)
    assert LAUNCHED == []


def test_what_it_can_take_is_launched() -> None:
    norm = declared(contiguous=("x",), divisible={"x": 8, "heads": 4}, dtypes=(torch.float32,), min_sm=90)
    norm(torch.ones(2, 16), heads=8)
    norm(torch.ones(0, 16), 4)  # zero tokens
    assert [tuple(x.shape) for x in LAUNCHED] == [(2, 16), (0, 16)]


def test_dtypes_are_those_of_floating_point_tensors() -> None:
    declared(dtypes=(torch.float32,))(torch.ones(2, dtype=torch.int32))


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    declared(min_sm=90)
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    assert re.findall(r"sm_\d+", requirements(registered()["norm"], {"x": x})) == ["sm_80", "sm_90"]
    declared(min_sm=80)
    assert requirements(registered()["norm"], {"x": x}) == ""


def test_cpu_tensors_are_refused_for_a_triton_launcher_that_is_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fast_path("triton", replaces=kernels.plain, tp="pointwise")(kernels.launch)
    with pytest.raises(FastPathError, match=r" triton: x .*TRITON_INTERPRET=1"):
        launcher(torch.ones(4))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert requirements(registered()["triton"], {"x": torch.ones(4)}) == ""


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_in_compiled_code_the_check_is_not_traced() -> None:
    norm = declared(contiguous=("x",))
    compiled = torch.compile(lambda x: norm(x.sin()), backend="eager", fullgraph=True)
    compiled(torch.ones(4, 2).t())


def test_an_argument_that_the_launcher_does_not_have_is_a_declaration_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"norm: launch .* weight, y"):
        declared(contiguous=("x", "weight"), divisible={"y": 2})
    assert registered() == {}


def test_a_custom_op_stays_one_and_its_calls_are_checked() -> None:
    @torch.library.custom_op("tpcompile_tests::checked", mutates_args=())
    def checked(x: Tensor) -> Tensor:
        return x * 2

    declared_op = fast_path("checked", replaces=plain_norm, contiguous=("x",))(checked)
    assert isinstance(declared_op, torch.library.CustomOpDef)

    @declared_op.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    declared_op.register_autograd(lambda ctx, grad: grad * 2)
    torch.library.opcheck(declared_op, (torch.ones(2, requires_grad=True),))
    for call in (declared_op, checked):  # also under the name that it had before
        with pytest.raises(FastPathError, match="checked: x of"):
            call(torch.ones(4, 2).t())


def test_files_that_are_declared_are_there() -> None:
    with pytest.raises(ConfigError, match=r"csrc/norm\.cu "):
        declared(files=("csrc/norm.cu",))
    declared(files=("kernels.py",))
    assert registered()["norm"].files == ("kernels.py",) and registered()["norm"].source.refused == ""
