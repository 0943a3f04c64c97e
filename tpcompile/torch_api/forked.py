"""Every private name of torch and Triton that forked ranks need; seen on torch 2.11.0 and 2.13.0.

name                                    why
_logging._internal.LOG_TRACE_HANDLER    made when torch is imported, from TORCH_TRACE
_logging.structured.INTERN_TABLE        file names that a trace gives once; one that begins here has given none
_logging._internal.trace_log            the logger of the structured trace
logging.Manager._clear_cache            Python's; called for each level that is set
triton._C                               Triton's native part, which can be initialised once
MODULES                                 imported before a fork, or each rank would import them in its first compile

`tests/torch_api/test_forked.py` fails when torch moves one of them.
"""

from __future__ import annotations

import logging
import os
import sys

import torch._logging._internal as logging_internal
import torch._logging.structured

MODULES = (
    "torch._dynamo.backends.common",
    "torch._dynamo.convert_frame",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.pad_mm",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
)


def new_trace_handler() -> None:
    """Read TORCH_TRACE again, for a trace of its own."""
    torch._logging.structured.INTERN_TABLE.clear()
    logging_internal.LOG_TRACE_HANDLER = None
    # Each level that is set clears what all loggers remember, which takes 8 ms for all of torch's: clear it once.
    manager = vars(logging.root.manager)
    manager["_clear_cache"] = lambda: None
    try:
        logging_internal._init_logs()
    finally:
        del manager["_clear_cache"]
        logging.root.setLevel(logging.root.level)


def import_triton_as_asked() -> None:
    """Make the next import of Triton its first, where TRITON_INTERPRET is set; without it nothing changes.

    Triton reads the variable when a kernel is declared, and its own library of kernels is declared when it is imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    for name in list(sys.modules):
        top, *_ = name.split(".")
        is_native = name.startswith("triton._C")  # it can be initialised once
        if top == "triton" and not is_native:
            del sys.modules[name]


def keep_trace_from(package: str) -> None:
    """Remove the handlers of a package from the structured trace: pytest 9 attaches its own to every such logger."""
    for handler in list(logging_internal.trace_log.handlers):
        if type(handler).__module__.startswith(package):
            logging_internal.trace_log.removeHandler(handler)
