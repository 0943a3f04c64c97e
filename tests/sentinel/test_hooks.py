"""What torch's hooks report about a compile, in one process."""

from __future__ import annotations

import pytest
import torch

from tpcompile.recording import CaptureSession
from tpcompile.sentinel.events import CompileStarted, Event
from tpcompile.sentinel.hooks import Hooks
from tpcompile.sentinel.progress import Progress


@pytest.mark.usefixtures("fresh_compiler")
def test_the_reason_of_a_recompile_is_one_line() -> None:
    progress = Progress(lambda found: None)
    progress.is_active = True
    reasons: list[str] = []

    def on(event: Event) -> None:
        if isinstance(event, CompileStarted):
            reasons.append(progress.reason)

    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with CaptureSession(count_regions=False) as session:
        hooks = Hooks(
            0,
            session,
            progress,
            on=on,
            note=lambda event, compile_id: None,
            say_raising=lambda: None,
            on_compile=lambda compile_: None,
        )
        hooks.install()
        compiled(torch.ones(3))
        compiled(torch.ones(4))
        hooks.remove()
    assert reasons[0] == ""
    assert "size mismatch" in reasons[1]
    assert "\n" not in reasons[1] and not reasons[1].startswith("0/0")
