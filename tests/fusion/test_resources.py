"""What kernels need of the GPU reaches the launches that run them, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.fusion import samples
from tpcompile.fusion import resources
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.wrapper import launches, triton_sources

CODE = """
async_compile = AsyncCompile()
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
@triton.jit
def triton_poi_fused_add_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

def call(args):
    triton_poi_fused_add_0.run(arg0_1, buf0, 64, stream=stream0)
    extern_kernels.mm(buf0, arg1_1, out=buf1)
    triton_poi_fused_add_0.run(buf1, buf2, 64, stream=stream0)
    return (buf2, )
"""
NAME = "triton_poi_fused_add_0"


def launched(registers: int) -> Any:
    config = SimpleNamespace(kwargs={"XBLOCK": 64}, num_warps=1, num_stages=1)
    one = SimpleNamespace(config=config, n_regs=registers, n_spills=0, shared=0)
    return SimpleNamespace(launchers=[one], compile_results=[])


def manifest(code: str) -> Manifest:
    found = tuple(samples.launch(call, number) for number, call in enumerate(launches(code)))
    return samples.manifest(samples.graph(0).model_copy(update={"launches": found}))


def registers(found: Manifest) -> list[tuple[int, ...]]:
    (graph,) = found.graphs
    return [tuple(one.registers for one in launch.resources) for launch in graph.launches]


def test_each_launch_of_a_kernel_has_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.resources, "generated_modules", lambda: [(CODE, {NAME: launched(18)})])
    assert registers(resources.with_launched(manifest(CODE))) == [(18,), (), (18,)]


def test_a_kernel_of_that_name_with_different_code_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    other = CODE.replace("pass", "other")
    monkeypatch.setattr(resources.resources, "generated_modules", lambda: [(other, {NAME: launched(18)})])
    assert registers(resources.with_launched(manifest(CODE))) == [(), (), ()]


def test_caches_and_the_hash_of_triton_are_no_part_of_the_code() -> None:
    meta = "inductor_meta={'backend_hash': 'abc', 'force_disable_caches': False, 'autotune_remote_cache': None}"
    on_gpu, without = (
        CODE.replace("@triton.jit", f"@heuristics({one})\n@triton.jit")
        for one in (meta, meta.replace("abc", "no GPU").replace("False", "True"))
    )
    other = on_gpu.replace("@triton.jit", "@heuristics(size_hints={'x': 64})\n@triton.jit")
    sources = [launches(code)[0].source for code in (on_gpu, without, other)]
    assert sources[0] == sources[1] != sources[2]


def test_the_source_of_a_kernel_is_in_the_code() -> None:
    assert list(triton_sources(CODE)) == [NAME]
    assert triton_sources(CODE)[NAME].startswith("\n@triton.jit\n")


def test_kernels_are_compiled_by_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    need = samples.resources(40).model_dump()
    asked: list[tuple[str, str]] = []

    def of_source(source: str, name: str) -> list[dict[str, Any]]:
        asked.append((source, name))
        return [need, {**need, "registers": 50}]

    monkeypatch.setattr(resources.resources, "of_source", of_source)
    found = resources.with_compiled(manifest(CODE), [CODE])
    assert registers(found) == [(40, 50), (), (40, 50)]
    assert asked == [(triton_sources(CODE)[NAME], NAME)]
