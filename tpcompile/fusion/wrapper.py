"""Generated code of Inductor -> its launches in order, from the text alone."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping

from tpcompile.evidence.records import Kernel
from tpcompile.evidence.text.code import parse_kernels
from tpcompile.evidence.text.normalise import GroupRoles
from tpcompile.fusion.manifest_records import Call, Role

_TRITON = re.compile(r"triton_(?P<kind>[a-z]{3})_fused")
_FUNCTIONS = re.compile(r"call|partition_\d+")
"""Functions of the generated code that launch."""
_EXTERN = ("extern_kernels.", "aten.", "inductor_ops.", "torch.ops.")
_COLLECTIVE = re.compile(r"torch\.ops\.(?:_c10d_functional|symm_mem|c10d|tpcompile(?=\.all_reduce_))\.(?P<op>\w+)")
_FILLS = frozenset({"copy_", "zero_", "fill_"})
_COMPUTES = frozenset({"sum", "to"})
"""Methods of a buffer by which the wrapper itself does work."""
_BUFFER = re.compile(r"(?:buf|arg|primals|tangents|workspace)_?\d")
_NOT_CODE = re.compile(r"'(?:backend_hash|force_disable_caches|autotune_(?:local|remote)_cache)': [^,}]*")
"""Which Triton compiles it for which GPU, and which caches are used: not what it computes."""
_HASH_LENGTH = 16


def launches(code: str) -> tuple[Call, ...]:
    """Every launch, in order. Raises SyntaxError for code that is not Python, of the C++ wrapper for example."""
    _phase, found = parse_kernels(code, roles=GroupRoles({}))
    kernels = {kernel.name: kernel for kernel in found if kernel.kind != "call"}
    calls: list[ast.Call] = []
    for function in ast.walk(ast.parse(code)):
        if not isinstance(function, ast.FunctionDef) or not _FUNCTIONS.fullmatch(function.name):
            continue
        inside = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        calls += sorted(inside, key=lambda call: (call.lineno, call.col_offset))
    launched = (_launch(call, kernels) for call in calls)
    return tuple(filter(None, launched))


def triton_sources(code: str) -> dict[str, str]:
    """The source of each Triton kernel that the code defines, by name."""
    found = {}
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("async_compile"), attr="triton"), args=[name, source, *_]):
                found[ast.literal_eval(name)] = ast.literal_eval(source)
    return found


def _launch(call: ast.Call, kernels: Mapping[str, Kernel]) -> Call | None:
    """None for a call that launches nothing: an allocation, a view, a guard of the device."""
    target = ast.unparse(call.func)
    kernel = kernels.get(target.removesuffix(".run"))
    if kernel is not None:
        named = _TRITON.match(kernel.name)
        kind = named["kind"] if named else kernel.kind.removesuffix("_pybinding")
        text = _NOT_CODE.sub("", kernel.code.replace(kernel.name, "KERNEL"))
        source = hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
        return Call(role=Role.KERNEL, name=kernel.name, kind=kind, source=source)
    if target.endswith(".run"):
        return Call(role=Role.KERNEL, name=target.removesuffix(".run"), kind="triton")
    if collective := _COLLECTIVE.match(target):
        role = Role.WAIT if collective["op"] == "wait_tensor" else Role.COLLECTIVE
        return Call(role=role, name=target, kind=collective["op"])
    if target.startswith(_EXTERN) and "_assert_" not in target:
        return Call(role=Role.EXTERN, name=target, kind=target.rsplit(".", 1)[0])
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in _FILLS or (method in _COMPUTES and _BUFFER.match(target)):
        return Call(role=Role.COPY if method == "copy_" else Role.WRAPPER, name=method, kind="eager")
    return None
