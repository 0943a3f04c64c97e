"""A program whose compiled results are not those of eager, which are right -> the layer, the op and a repro."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tpcompile.choices import AnyMode
from tpcompile.gate.phases import Phases
from tpcompile.numerics.wrong_compiled import Route, search

_SHARE = 0.4
"""Share of the time that the others wait at the end of a phase: a rank that searches alone must arrive by then."""


def find_wrong_code(
    phases: Phases,
    mode: AnyMode,
    call: Callable[[], Any],
    is_right: Callable[[Any], bool],
    *,
    differs: bool,
    eager_is_wrong: bool,
) -> None:
    """Search where some rank is wrong only compiled; all ranks must call it, before the compiled program is closed.

    `call` calls the compiled program once, and `is_right` judges what it returned; all ranks call both alike.
    """
    if not phases.ranks.any_says(f"{mode}/compiled differs", differs):
        return
    if phases.ranks.any_says(f"{mode}/eager wrong", eager_is_wrong):
        return  # where eager is wrong, that is the finding
    with phases.phase(f"{mode}/compiled", "find the layer of the compiler"), phases.session.unrecorded():
        began = time.process_time()
        phases.session.reset_compiler()
        call()
        route = Route(
            call=call,
            is_right=is_right,
            reset=phases.session.reset_compiler,
            all_say=lambda question, answer: phases.ranks.all_say(f"{mode}/{question}", answer),
            folder=phases.folder,
            shows_names=True,
            timeout_s=_SHARE * phases.config.gate.store_timeout_s,
            rank=phases.ranks.store.rank,
            red_cpu_s=time.process_time() - began,
        )
        phases.facts = phases.facts.changed(wrong_compiled=search(route))
