"""Settings of the process that torch guards -> names, values and causes: one list for the start and for mid-run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tpcompile.evidence.compiles.shapes import json_object
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records.causes import Cause

_CAUSES = {
    "autocast": Cause.AUTOCAST,
    "default_dtype": Cause.DEFAULT_DTYPE,
    "grad_mode": Cause.GRAD_MODE,
    "deterministic": Cause.DETERMINISTIC,
    "num_threads": Cause.NUM_THREADS,
    "allow_tf32": Cause.ALLOW_TF32,
    "allow_bf16_reduce": Cause.MATMUL_PRECISION,
    "allow_fp16_reduce": Cause.MATMUL_PRECISION,
    "fp32_precision": Cause.MATMUL_PRECISION,
    "float32_matmul_precision": Cause.MATMUL_PRECISION,
}
"""Prefix of a setting's name -> its cause; of several settings that differ, the first in this order is reported."""
_GUARDED = re.compile(r"(?>.*?against )(?P<state>\{.*\})")
_DEVICES = ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "privateuse1", "mps")
"""at::autocast::_AUTOCAST_SUPPORTED_DEVICES, the order in which the state of autocast lists them."""
_DTYPES = {5: "float16", 6: "float32", 7: "float64", 15: "bfloat16"}
"""c10::ScalarType."""


def cause_of(setting: str) -> Cause:
    """Cause of a difference in a setting."""
    begins = find(_CAUSES, setting.startswith)
    return _CAUSES[begins] if begins else Cause.PROCESS_STATE


def settings_of(expression: str) -> dict[str, str]:
    """Setting -> value, from the guard `___check_global_state() against {...}`; empty for any other guard."""
    match = _GUARDED.match(expression)
    if match is None:
        return {}
    return dict(_settings(json_object(match["state"])))


def settings_changed(reason: str) -> list[str]:
    """`grad_mode num_threads` of a recompile reason -> the settings, in the order of `_CAUSES`."""
    order = {cause: place for place, cause in enumerate(dict.fromkeys(_CAUSES.values()))}
    return sorted(reason.split(), key=lambda name: order.get(cause_of(name), len(order)))


def _settings(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings and their values as text, from torch's JSON."""
    for name, value in state.items():
        if name == "autocast_state":
            for device, is_on in zip(_DEVICES, value.get("enabled", ()), strict=False):
                yield f"autocast {device}", _shown(is_on)
            for device, dtype in zip(_DEVICES, value.get("dtype", ()), strict=False):
                yield f"autocast dtype {device}", _DTYPES.get(dtype, str(dtype))
            yield "autocast cache", _shown(value.get("cached_enabled", True))
        elif name == "default_dtype":
            yield name, _DTYPES.get(value, str(value))
        else:
            yield name, _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
