"""Guard lookups and compiles of this process -> how many compiled regions each call of a compiled callable entered."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import nn

from tpcompile.evidence.records import RegionCount, UserLine
from tpcompile.torch_api import compiler as compat


@dataclass
class _Count:
    """Calls of one compiled callable in one phase."""

    target: UserLine
    token: object = None
    """Identity of the latest call that entered a region."""
    calls: int = 0
    entered: int = 0
    in_call: int = 0
    most: int = 0
    runs_at: UserLine | None = None
    compiled: list[str] = field(default_factory=list)


class RegionCounter:
    """Counts compiled regions entered, at each guard hit and each compile; a few microseconds each."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, CodeType | None], _Count] = {}

    def entered(self, frame: FrameType | None, *, phase: str, compile_id: str = "") -> None:
        """Count a compiled region that is entered below `frame`; `compile_id`: of the compile that made it now."""
        call = compat.compiled_call(frame)
        if call is None:
            return
        code = _code(call.function)
        count = self._counts.get((phase, code))
        if count is None:
            target = UserLine(file="?", line=0, function=type(call.function).__qualname__)
            if code is not None:
                target = UserLine(file=code.co_filename, line=code.co_firstlineno, function=code.co_qualname)
            count = self._counts[phase, code] = _Count(target)
        if call.token is not count.token:
            count.token, count.in_call = call.token, 0
            count.calls += 1
        count.entered += 1
        count.in_call += 1
        count.most = max(count.most, count.in_call)
        if compile_id:
            count.compiled.append(compile_id)
        if call.around is not None and count.runs_at is None:
            around = call.around
            count.runs_at = UserLine(
                file=around.f_code.co_filename, line=around.f_lineno, function=around.f_code.co_name
            )

    def counts(self) -> tuple[RegionCount, ...]:
        """What was counted so far."""
        return tuple(
            RegionCount(
                phase=phase,
                target=count.target,
                calls=count.calls,
                entered=count.entered,
                most=count.most,
                runs_at=count.runs_at,
                compiled=tuple(count.compiled),
            )
            for (phase, _), count in self._counts.items()
        )


def _code(function: Any) -> CodeType | None:
    """Code of the function, or of the `forward` of the module, that the user compiled."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        function = type(owner).forward
    return getattr(function, "__code__", None)
