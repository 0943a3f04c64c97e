"""The names that registers are read from, and what is not known of a kernel that did not run."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from tpcompile.torch_api import resources

CONFIG = SimpleNamespace(kwargs={"XBLOCK": 8, "R0_BLOCK": 64}, num_warps=4, num_stages=1)


def launcher(registers: int | None) -> Any:
    return SimpleNamespace(config=CONFIG, n_regs=registers, n_spills=2, shared=256)


def kernel(*launchers: Any) -> Any:
    return SimpleNamespace(launchers=list(launchers), compile_results=[])


def test_what_runs_is_read_from_its_launcher() -> None:
    assert resources.of_launched(kernel(launcher(32))) == [
        {
            "configuration": "R0_BLOCK=64 XBLOCK=8 num_stages=1 num_warps=4",
            "registers": 32,
            "spills": 2,
            "shared_bytes": 256,
        }
    ]


@pytest.mark.parametrize("launchers", [(), (launcher(32), launcher(40)), (launcher(None),)])
def test_nothing_is_known_of_a_kernel_that_did_not_run(launchers: tuple[Any, ...]) -> None:
    assert resources.of_launched(kernel(*launchers)) == []


def test_cuobjdump_prints_registers_and_the_frame() -> None:
    text = "Function triton_:\n  REG:40 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0"
    found = resources._USAGE.search(text)
    assert found is not None
    assert found.groups() == ("40", "16")


def test_a_launcher_says_what_its_kernel_needs() -> None:
    pytest.importorskip("triton")
    from torch._inductor.runtime import triton_heuristics

    for result in (triton_heuristics.TritonCompileResult, triton_heuristics.StaticTritonCompileResult):
        source = inspect.getsource(result.make_launcher)
        assert all(f"launcher.{name} = " in source for name in ("config", "n_regs", "n_spills", "shared"))


def test_an_autotuner_has_its_configurations_and_compiles_one() -> None:
    pytest.importorskip("triton")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    source = inspect.getsource(CachingAutotuner.__init__)
    assert all(f"self.{name}" in source for name in ("configs", "launchers", "compile_results"))
    assert list(inspect.signature(CachingAutotuner._precompile_config).parameters) == ["self", "cfg"]


def test_generated_modules_are_those_with_triton_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch._inductor.codecache import PyCodeCache

    path = tmp_path / "code.py"
    path.write_text("the code")
    found, other = SimpleNamespace(__file__=str(path), any=kernel()), SimpleNamespace(__file__=str(path), any=1)
    gone = SimpleNamespace(__file__=str(tmp_path / "gone.py"), any=kernel())
    assert isinstance(PyCodeCache.modules, list)
    monkeypatch.setattr(PyCodeCache, "modules", [found, other, gone])
    assert list(resources.generated_modules()) == [("the code", {"any": found.any})]
