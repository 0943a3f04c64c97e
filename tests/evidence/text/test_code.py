"""Generated code of Inductor -> kernels; C++ and Triton samples in the form torch 2.11 and 2.13 write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.evidence.records import Kernel
from tpcompile.evidence.text.code import overwritten_reads, parse_kernels, without_unused_symbols
from tpcompile.evidence.text.normalise import GroupRoles

TRITON = """\
# AOT ID: ['{aot}_forward']
from ctypes import c_void_p, c_long, c_int
import torch
from torch._inductor.async_compile import AsyncCompile
aten = torch.ops.aten
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
async_compile = AsyncCompile()


# kernel path: /tmp/torchinductor_u{rank}/ab/cab{rank}.py
# Topologically Sorted Source Nodes: [y, add], Original ATen: [aten.mul, aten.add]
# Source node to ATen node mapping:
#   y => mul
triton_poi_fused_add_mul_0 = async_compile.triton('triton_poi_fused_add_mul_0', '''
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import AutotuneHint, ReductionHint, TileHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(
    size_hints={{'x': 32}},
    filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32'}}, 'device': \
DeviceProperties(type='cuda', index={rank}, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, \
max_threads_per_multi_processor=2048, warp_size=32), 'constants': {{}}, \
'configs': [{{(0,): [['tt.divisibility', 16]]}}]}},
    inductor_meta={{'kernel_name': 'triton_poi_fused_add_mul_0', 'mutated_arg_names': [], 'num_load': 1}},
    min_elem_per_thread=0
)
@triton.jit
def triton_poi_fused_add_mul_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 32
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_ptr0 + (xindex), xmask)
    tmp1 = {factor}
    tmp2 = tmp0 * tmp1
    tl.store(out_ptr0 + (xindex), tmp2, xmask)
''', device_str='cuda')


# kernel path: /tmp/torchinductor_u{rank}/cd/ccd{rank}.py
triton_red_fused_sum_1 = async_compile.triton('triton_red_fused_sum_1', '''
@triton.jit
def triton_red_fused_sum_1(in_ptr0, out_ptr0, xnumel, r0_numel):
    pass
''', device_str='cuda')


async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
        assert_size_stride(primals_1, (4, 8), (8, 1))
        with torch.cuda._DeviceGuard({rank}):
            torch.cuda.set_device({rank})
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
            # Topologically Sorted Source Nodes: [y], Original ATen: [aten.mul]
            stream{rank} = get_raw_stream({rank})
            raw_stream{rank} = get_raw_stream({rank})
            triton_poi_fused_add_mul_0.run(primals_1, buf0, 32, stream=stream{rank})
            # Topologically Sorted Source Nodes: [out], Original ATen: [_c10d_functional.all_reduce]
            torch.ops._c10d_functional.all_reduce_.default(buf0, '{reduce}', '{group}')
            torch.ops._c10d_functional.wait_tensor.default(buf0)
            buf3 = torch.ops.aten.zeros.default([4], device=device(type='cuda', index={rank}), pin_memory=False)
            buf4 = buf3; del buf3  # reuse
        return (buf0, buf4, )

runner = Runner(partitions=[])
call = runner.call

def get_args():
    from torch._dynamo.testing import rand_strided
    primals_1 = rand_strided((4, 8), (8, 1), device='cuda:{rank}', dtype=torch.float32)
    return [primals_1]
"""

CPP = """\
# AOT ID: ['{aot}_{phase}']
import torch
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()

cpp_fused_add_mul_0 = async_compile.cpp_pybind(['const float*', 'float*'], r'''
#include "/tmp/torchinductor_u{rank}/3b/c3bi5gk6mslf6u4iaqafhxm64z6u65e3eain4xlary5blqnvv6xx.h"
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{{
    #pragma GCC ivdep
    for(int64_t x0=static_cast<int64_t>(0LL); x0<static_cast<int64_t>(32LL); x0+=static_cast<int64_t>(16LL))
    {{
        auto tmp1 = static_cast<float>({factor});
    }}
}}
''')


async_compile.wait(globals())
del async_compile

def call(args):
    arg0_1, = args
    args.clear()
    buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
    cpp_fused_add_mul_0(arg0_1, buf0)
    torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '{group}')
    return (buf0, )


def benchmark_compiled_module(times=10, repeat=10):
    pass
"""


def triton(rank: int = 0, aot: int = 0, factor: str = "2.0", reduce: str = "sum", group: str = "0") -> str:
    """Triton code as rank `rank` on its own GPU gets it."""
    return TRITON.format(rank=rank, aot=aot, factor=factor, reduce=reduce, group=group)


def cpp(rank: int = 0, aot: int = 0, phase: str = "forward", factor: str = "2.0", group: str = "0") -> str:
    """C++ code as rank `rank` gets it."""
    return CPP.format(rank=rank, aot=aot, phase=phase, factor=factor, group=group)


def kernels(code: str, **roles: str) -> tuple[Kernel, ...]:
    """Kernels of the code; `roles` maps `_NAME` to a role."""
    return parse_kernels(code, roles=GroupRoles({name[1:]: role for name, role in roles.items()}))[1]


@pytest.mark.parametrize("sample", [triton, cpp])
def test_rank_device_stream_paths_and_aot_number_do_not_count(sample) -> None:
    one, two = sample(rank=0, aot=0, group="0"), sample(rank=5, aot=3, group="7")
    assert one != two
    assert kernels(one, _0="tp") == kernels(two, _7="tp")


def test_no_path_device_index_or_stream_number_is_left_in_triton_code() -> None:
    text = "\n".join(k.code for k in kernels(triton(rank=5), _0="tp"))
    assert not any(part in text for part in ("/tmp", "index=5", "cuda:5", "stream5", "(5)", "kernel path", "reuse"))


def test_the_random_number_of_a_buffer_in_symmetric_memory_does_not_count() -> None:
    one, two = (triton().replace("def call(", f"buf = empty_strided_p2p(alloc_id={n})\ndef call(") for n in (7, 8))
    assert "alloc_id=7" in one and kernels(one, _0="tp") == kernels(two, _0="tp")


def test_every_kernel_has_its_name_and_kind_and_the_wrapper_comes_last() -> None:
    found = [(k.name, k.kind) for k in kernels(triton())]
    assert found == [("triton_poi_fused_add_mul_0", "triton"), ("triton_red_fused_sum_1", "triton"), ("call", "call")]
    assert [k.kind for k in kernels(cpp())] == ["cpp_pybind", "call"]


def test_the_wrapper_holds_launches_and_collectives_but_no_benchmark_code() -> None:
    call = kernels(triton(), _0="tp")[-1].code
    assert "all_reduce_.default(buf0, 'sum', group:tp)" in call
    assert "triton_poi_fused_add_mul_0.run(" in call
    assert "get_args" not in call and "benchmark" not in kernels(cpp())[-1].code


@pytest.mark.parametrize("sample", [triton, cpp])
def test_a_constant_in_a_kernel_counts(sample) -> None:
    assert kernels(sample(factor="2.0"))[0] != kernels(sample(factor="3.0"))[0]


def test_the_reduce_op_and_the_group_role_in_the_wrapper_count() -> None:
    usual = kernels(triton(), _0="tp")[-1]
    assert usual != kernels(triton(reduce="max"), _0="tp")[-1]
    assert usual != kernels(triton(), _0="dp")[-1]


def test_properties_of_the_gpu_count() -> None:
    assert kernels(triton())[0] != kernels(triton().replace("cc=90", "cc=80"))[0]


def test_preprocessor_lines_of_cpp_are_kept() -> None:
    code = kernels(cpp())[0].code
    assert "#pragma GCC ivdep" in code and "#include <torch/csrc/inductor/cpp_prefix.h>" in code


@pytest.mark.parametrize(
    ("phase", "expected"), [("forward", "forward"), ("inference", "forward"), ("backward", "backward")]
)
def test_the_phase_is_in_the_aot_id(phase: str, expected: str) -> None:
    found, code = parse_kernels(cpp(phase=phase), roles=GroupRoles({}))
    assert found == expected and {k.phase for k in code} == {expected}


def test_code_without_an_aot_id_is_forward() -> None:
    assert parse_kernels("def call(args):\n    return args\n", roles=GroupRoles({}))[0] == "forward"


def test_an_included_header_does_not_count_by_its_path(tmp_path: Path) -> None:
    other = cpp().replace("/tmp/torchinductor_u0", str(tmp_path))
    assert kernels(cpp()) == kernels(other)


REDUCED_IN_PLACE = """
    buf2 = empty_strided_cpu((3, 2), (2, 1), torch.float32)
    buf0 = reinterpret_tensor(buf2, (3, 1), (2, 1), 0)  # alias
    buf1 = reinterpret_tensor(buf2, (3, 1), (2, 1), 1)  # alias
    cpp_fused_sum_0(arg0_1, arg1_1, buf0, buf1)
    del buf1
    torch.ops._c10d_functional.all_reduce_.default(buf2, 'sum', 'group:tp')
    torch.ops._c10d_functional.wait_tensor.default(buf2)
    buf7 = empty_strided_cpu((3, 1), (1, 1), torch.float32)
    cpp_fused_mul_1(buf2, {read}, buf7)
    {after}
    return (buf7, )
"""


def test_an_all_reduce_in_place_under_a_tensor_that_is_read_later_is_found() -> None:
    assert overwritten_reads(REDUCED_IN_PLACE.format(read="buf0", after="")) == (0,)
    assert overwritten_reads(REDUCED_IN_PLACE.format(read="arg0_1", after="return (buf7, buf0, )")) == (0,)


@pytest.mark.parametrize("read", ["arg0_1", "buf20"])
def test_reading_the_result_or_freeing_a_part_is_no_finding(read: str) -> None:
    assert overwritten_reads(REDUCED_IN_PLACE.format(read=read, after="del buf0")) == ()
    assert overwritten_reads(REDUCED_IN_PLACE.format(read=read, after="buf9 = buf0; del buf0")) == ()
    freed_before = REDUCED_IN_PLACE.format(read="arg0_1", after="").replace("del buf1", "del buf1\n    del buf0")
    assert overwritten_reads(freed_before + "    kernel(buf0)") == (), "the name is another tensor's by then"


SLICED = """
def call(self, args):
    {inputs} = args
    args.clear()
    s36 = {size}
    {offset}assert_size_stride({x}, (s36, 6), (6, 1), 'input')
    {used}return ({gradients}buf1, s36, {saved})
"""
WITHOUT = {"size": "primals_1", "x": "primals_2", "inputs": "primals_1, primals_2"}
WITH = {"size": "primals_1", "x": "primals_3", "inputs": "primals_1, primals_2, primals_3"}
SET = "s23 = primals_2\n    "


def sliced(names: dict[str, str], *, gradients: str, offset: str = "", used: str = "", saved: str = "") -> str:
    """A wrapper whose input begins somewhere in memory."""
    return without_unused_symbols(SLICED.format(**names, offset=offset, used=used, gradients=gradients, saved=saved))


def test_a_symbol_that_nothing_uses_is_left_out_of_a_wrapper() -> None:
    plain = sliced(WITHOUT, gradients="None, ")
    assert sliced(WITH, gradients="None, None, ", offset=SET, saved="s23, ") == plain
    assert "s23" not in plain and "input_1" in plain


def test_a_symbol_that_a_kernel_reads_stays() -> None:
    read = sliced(WITH, gradients="None, None, ", offset=SET, used="kernel(buf1, s23)\n    ")
    assert read != sliced(WITHOUT, gradients="None, ") and "kernel(buf1, s23)" in read
