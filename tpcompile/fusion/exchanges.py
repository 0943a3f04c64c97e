"""Two launches, one of them a collective -> why they are two, and what would overlap them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpcompile.fusion.manifest_records import Launch, Role
from tpcompile.fusion.reasons import Boundary, Reason

ASYNC_TP = "_inductor.config._micro_pipeline_tp"
"""The setting, as a manifest has it, by which Inductor makes one op of an exchange and a matmul."""
_MATMULS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"})
_TAKEN = frozenset({"aten.mm", "aten._scaled_mm"})
"""The matmuls that torch 2.11 and 2.13 look for."""
_GATHER, _SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
_ENABLE = "torch.distributed._symmetric_memory.enable_symm_mem_for_group(group)"
_WAITS = {_GATHER: "the matmul waits for the all-gather", _SCATTER: "the reduce-scatter waits for the matmul"}
_INSTEAD = {"aten.bmm": "F.linear or x @ weight, which is an mm; then async TP (config._micro_pipeline_tp)"}


def reason_of_exchange(both: Sequence[Launch], settings: Mapping[str, str]) -> Reason | None:
    """None where neither is a collective."""
    exchanges = [one for one in both if one.role is Role.COLLECTIVE]
    if not exchanges:
        return None
    kind = _with_matmul(both)
    if kind:
        return _async_tp(kind, both, is_on=settings.get(ASYNC_TP) == "True")
    text = f"{exchanges[0].kind} is a collective: the kernels before and after it are apart"
    return Reason(boundary=Boundary.COLLECTIVE, text=text)


def _with_matmul(both: Sequence[Launch]) -> str:
    """What async TP is for: a matmul behind an all-gather, or before a reduce-scatter; empty for any other pair."""
    first, second = both
    if first.kind.startswith(_GATHER):
        return _GATHER if _matmul(second) else ""
    return _SCATTER if second.kind.startswith(_SCATTER) and _matmul(first) else ""


def _matmul(launch: Launch) -> str:
    """The matmul that it computes, as the graph called it; empty for none."""
    return min(_MATMULS & set(launch.ops), default="")


def _async_tp(kind: str, both: Sequence[Launch], *, is_on: bool) -> Reason:
    text = _WAITS[kind]
    remedy = f"async TP: config._micro_pipeline_tp, and {_ENABLE}"
    if is_on:
        text = f"async TP is on and did not match: {text}"
        remedy = f"{_ENABLE} before the compile"
    matmul = next(filter(None, map(_matmul, both)))
    if matmul not in _TAKEN:
        text += f", and async TP does not look for {matmul.removeprefix('aten.')}"
        remedy = _INSTEAD.get(matmul, "")
    return Reason(boundary=Boundary.COLLECTIVE, text=text, remedy=remedy)
