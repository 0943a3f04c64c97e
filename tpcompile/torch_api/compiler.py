"""Private torch API that capture needs, all of it: seen on torch 2.11.0 and 2.13.0.

`tests/torch_api/test_compiler.py` fails when any of it moves.
"""

from __future__ import annotations

import functools
import linecache
import logging
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch._functorch.config as _functorch_config
import torch._inductor.config as _inductor_config
import torch._inductor.utils as _inductor_utils
import torch.distributed as dist
import torch.fx.graph as _fx_graph
from torch._dynamo import config as _dynamo_config
from torch._dynamo.utils import counters as _counters
from torch._dynamo.utils import get_compilation_metrics
from torch._dynamo.utils import get_traced_code as _get_traced_code
from torch._logging import _internal as _logging_internal
from torch._logging import structured as _structured
from torch.distributed._functional_collectives import AsyncCollectiveTensor as _AsyncCollectiveTensor
from torch.nn.attention import SDPBackend

from tpcompile.evidence.records import SkippedFrame, UserLine
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.lines import is_library_file, line_at
from tpcompile.torch_api import c10d, flags

PER_RANK_ENVIRONMENT = frozenset({
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_TRACE", "TORCH_LOGS_OUT", "TORCH_COMPILE_DEBUG_DIR", "TRITON_CACHE_DIR",
    "TRITON_HOME", "TRITON_DUMP_DIR", "TORCHINDUCTOR_COMPILE_THREADS",
})  # fmt: skip
"""Variables that name places of a rank or cores of a machine: healthy ranks differ in them, `environment` has none."""
_COMPILE_ENVIRONMENT = (
    "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_DISTRIBUTED_COMPILE", "TORCH_SYMM_MEM", "AOT_",
    "TRITON_", "NCCL_ALGO", "NCCL_PROTO",
    "NCCL_NVLS_ENABLE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING",
)  # fmt: skip
"""Beginnings of the names of variables that change what is compiled, or what a library chooses for it."""
_MACHINE_CONFIG = ("cache_dir", "debug_dir", "compile_threads", "worker", "cuda_cxx", ".cxx", "path")
"""Parts of config names that describe the machine or where files go, not what is compiled."""


class TraceHandler(logging.Handler):
    """Receives every record of torch's structured trace in this process.

    `trace_structured` emits records only while the `torch.__trace` logger has a handler; TORCH_TRACE is not needed.
    """

    def __init__(self, receive: Callable[[dict[str, Any], str | None], None]) -> None:
        super().__init__(logging.DEBUG)
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        """Pass metadata and payload to `receive`; an exception in it does not reach the user's compile."""
        try:
            # torch sets both attributes on the records of this one logger
            self._receive(record.metadata, record.payload)  # type: ignore[attr-defined]
        except Exception:  # a logging handler must not raise into the compiler
            self.handleError(record)


@contextmanager
def tracing(handler: TraceHandler) -> Iterator[None]:
    """Attach the handler to the structured trace."""
    _logging_internal.trace_log.addHandler(handler)
    try:
        yield
    finally:
        _logging_internal.trace_log.removeHandler(handler)


_innermost = _fx_graph._parse_stack_trace
Stacks = dict[tuple[str, int], set[str]]
"""File and line that a graph names -> all stacks of nodes on that line, as torch prints them."""
_asking: list[Stacks] = []
"""One entry for each active `users_lines`; sessions may end in any order."""


@contextmanager
def users_lines() -> Iterator[Stacks]:
    """Let the graphs that torch prints carry the innermost line outside of torch and of our wrappers.

    torch gives the innermost line of all, which for a collective is in torch or in tpcompile. The lines are in no cache
    key. Yields the stacks of the nodes that torch prints meanwhile.
    """
    stacks: Stacks = {}
    _asking.append(stacks)
    _fx_graph._parse_stack_trace = _users_line
    try:
        yield stacks
    finally:
        _asking[:] = [asking for asking in _asking if asking is not stacks]
        if not _asking and _fx_graph._parse_stack_trace is _users_line:
            _fx_graph._parse_stack_trace = _innermost


def _users_line(stack_trace: str, filter_fn: Callable[[str, str, str], bool] | None = None) -> Any:
    if filter_fn is not None:
        return _innermost(stack_trace, filter_fn)
    found = _innermost(stack_trace, lambda file, *_: not is_library_file(file))
    if not found:
        return _innermost(stack_trace, None)
    for stacks in _asking:
        stacks.setdefault((found.file, int(found.lineno)), set()).add(stack_trace)
    return found


def interned_strings() -> dict[int, str]:
    """Index -> file name of the structured trace's string table, including those sent before a handler was attached."""
    return {index: text for text, index in _structured.INTERN_TABLE.items()}


def traced_code() -> list[CodeType]:
    """Code objects that the current compile has traced, inlined functions included; empty outside of a compile.

    Complete when the event `dynamo_output_graph` arrives, and empty again when the compile ends.
    """
    return list(_get_traced_code() or ())


_compiled: Any = torch.compile(lambda: None, backend="eager")
COMPILE_WRAPPER: CodeType = _compiled.__code__
"""Code object that all wrappers share which torch.compile makes, one wrapper for each compiled callable."""


class CompiledCall(NamedTuple):
    """A call of a compiled callable that has not returned."""

    function: Any
    """What the user compiled, as Dynamo calls it."""
    token: object
    """Identity of the call: the same object during one call; a later call has a different one while this is alive."""
    around: FrameType | None
    """Outermost frame of user code that runs in Python between the callable and the given frame."""


def compiled_call(frame: FrameType | None) -> CompiledCall | None:
    """The innermost call of a compiled callable below which `frame` runs; None outside of one."""
    around = None
    while frame is not None and frame.f_code is not COMPILE_WRAPPER:
        file = frame.f_code.co_filename
        if file.startswith(_DYNAMO):
            around = None  # all below is Dynamo at work
        elif not _is_library(file):
            around = frame
        frame = frame.f_back
    if frame is None:
        return None
    values = frame.f_locals
    return CompiledCall(values["fn"], values["cleanups"], around)


def program_lines(frame: FrameType | None) -> list[UserLine]:
    """The program's lines that called the compiled callable below which `frame` runs, outermost first.

    Outside of a compiled callable, all lines of the program that lead to the frame.
    """
    wrapper = frame
    while wrapper is not None and wrapper.f_code is not COMPILE_WRAPPER:
        wrapper = wrapper.f_back
    lines: list[UserLine] = []
    for one, number in traceback.walk_stack(wrapper or frame):
        file = one.f_code.co_filename
        if not _is_library(file):
            lines.append(line_at(one, number))
    return lines[::-1]


_is_library = functools.cache(is_library_file)
_DYNAMO = os.path.dirname(torch._dynamo.__file__) + os.sep


def failed_frames() -> list[SkippedFrame]:
    """Frames whose compile failed, among the last 64 compiles of this process; Dynamo runs their code in eager."""
    found = []
    for metrics in get_compilation_metrics():
        if metrics.fail_type is None or metrics.co_filename is None:
            continue
        frame = UserLine(file=metrics.co_filename, line=metrics.co_firstlineno or 0, function=metrics.co_name or "")
        broke_at = None
        file, line = metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno
        if file and line:
            broke_at = UserLine(file=file, line=line, code=linecache.getline(file, line).strip())
        reason = metrics.fail_reason or metrics.fail_type
        found.append(SkippedFrame(line=frame, reason=reason.strip().splitlines()[0], broke_at=broke_at))
    return found


def dynamo_counters() -> dict[str, int]:
    """Dynamo's counters in this process: frames started, unique graphs, graph breaks."""
    return {
        "frames": int(_counters["frames"]["total"]),
        "graphs": int(_counters["stats"]["unique_graphs"]),
        "breaks": int(sum(_counters["graph_break"].values())),
    }


def cuda_graph_counters() -> dict[str, int]:
    """Inputs of the CUDA graphs that this process recorded, and how many graphs could not be recorded."""
    found = _counters["inductor"]
    return {
        "recorded": int(found["cudagraph_recorded_non_static_inputs"]),
        "skipped": int(found["cudagraph_skips"]),
    }


def group_roles() -> dict[str, str]:
    """Process-group name -> role: the mesh axis for groups of a DeviceMesh, else the group's description or size.

    A second group with the same role and ranks gets ` #2`: all ranks create their groups in the same order.
    """
    roles: dict[str, str] = {}
    if not dist.is_initialized():
        return roles
    made: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for group, name in c10d.known_groups():
        description = getattr(group, "group_desc", "") or "undefined"
        is_described = description != "undefined"
        role = description.removeprefix("mesh_") if is_described else f"{group.size()} ranks"
        alike = role, tuple(dist.get_process_group_ranks(group))
        made[alike] += 1
        is_first = made[alike] == 1
        roles[str(name)] = role if is_first else f"{role} #{made[alike]}"
    return roles


def compile_config() -> dict[str, str]:
    """Settings of Dynamo, AOTAutograd and Inductor that affect compilation and differ from their default."""
    settings: dict[str, str] = {}
    for module in (_dynamo_config, _functorch_config, _inductor_config):
        for line in module.codegen_config().splitlines():
            name, _, value = line.partition(" = ")
            known = module._config.get(name.removeprefix(f"{module.__name__}."))
            # codegen_config also lists a setting that was patched and restored, with its default.
            is_default = known is not None and repr(known.default) == value
            is_of_machine = any(part in name for part in _MACHINE_CONFIG)
            if not is_default and not is_of_machine:
                # Passes and loggers are functions, with addresses, and sets of them have no order.
                settings[name.removeprefix("torch.")] = normalise.sets(normalise.objects(value))
    return settings


def environment() -> dict[str, str]:
    """The environment layer: versions, device, compile-relevant variables and configs, resolved backends."""
    facts = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton_version(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "num_threads": str(torch.get_num_threads()),
        "default_dtype": str(torch.get_default_dtype()),
    }
    facts |= flags.backend_flags()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "gpu": properties.name,
            "driver": driver_version(),
            "capability": f"{properties.major}.{properties.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    facts |= {
        f"env {key}": value
        for key, value in os.environ.items()
        if key.startswith(_COMPILE_ENVIRONMENT) and key not in PER_RANK_ENVIRONMENT
    }
    return facts | {f"config {key}": value for key, value in compile_config().items()}


def sdpa_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> str:
    """Name of the backend that `scaled_dot_product_attention` selects for these arguments; computes nothing."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, **options)).name


def autotune_settings() -> dict[str, str]:
    """Inductor's autotuning settings, as resolved from defaults, environment variables and patches."""
    config, families = _inductor_config, ("ATEN", "TRITON", "CPP", "CUTLASS", "CK", "CKTILE", "NVGEMM")
    asked = config.max_autotune_gemm_backends
    taken = [name for name in families if _inductor_utils._use_autotune_backend(name)]
    return {
        "inductor max_autotune": str(config.max_autotune),
        "inductor max_autotune_gemm": str(config.max_autotune or config.max_autotune_gemm),
        "inductor gemm backends": f"{','.join(taken)} of {asked}",
        "inductor conv backends": str(config.max_autotune_conv_backends),
        "inductor cutlass": "found" if find_spec("cutlass") or find_spec("cutlass_api") else "none",
    }


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; an AsyncCollectiveTensor is waited for and unwrapped."""
    return tensor.trigger_wait() if isinstance(tensor, _AsyncCollectiveTensor) else tensor


def driver_version() -> str:
    """Version of the NVIDIA kernel module, as the kernel reports it; `unknown` where it reports none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return "unknown" if match is None else match[0]


def triton_version() -> str:
    """Version of the Triton that can be imported; `none` without one."""
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


class FailedCompile(NamedTuple):
    """What an exception says of the compile that raised it."""

    compile_id: str
    """Empty when no compile raised it."""
    stack: tuple[UserLine, ...]
    """The lines that Dynamo was tracing; empty where a backend raised it."""


def failed_compile(error: BaseException) -> FailedCompile:
    """What Dynamo notes on an exception that leaves a compile."""
    frames = getattr(error, "real_stack", None) or ()
    stack = [UserLine(file=f.filename, line=f.lineno or 0, function=f.name, code=f.line or "") for f in frames]
    return FailedCompile(str(getattr(error, "compile_id", None) or ""), tuple(stack))
