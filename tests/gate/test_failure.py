"""An exception of a rank -> its check: the kind of exception, and a line that the user has written."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._dynamo.exc import InternalTorchDynamoError

from tpcompile.evidence.records.causes import Cause
from tpcompile.gate.failure import failure_check

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:123"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError(GLOO), Cause.COMMUNICATION),
        (InternalTorchDynamoError("no backward"), Cause.COMPILE_FAILED),
        (RuntimeError("shape mismatch"), Cause.UNKNOWN),
        (ValueError(GLOO), Cause.UNKNOWN),
    ],
)
def test_the_kind_of_an_exception_is_known(error: Exception, cause: Cause) -> None:
    found = failure_check(error, None, rank=1, mode="C", phase="C/first")
    assert (found.cause, found.ranks, "in phase C/first" in found.observed) == (cause, (1,), True)


def test_generated_code_is_not_the_line_to_blame(tmp_path: Path) -> None:
    generated = tmp_path / "torchinductor_me" / "ab" / "cab.py"
    generated.parent.mkdir(parents=True)
    generated.write_text("def call():\n    raise RuntimeError('in generated code')\n")
    names: dict[str, object] = {}
    exec(compile(generated.read_text(), str(generated), "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        names["call"]()  # type: ignore[operator]
    line = failure_check(raised.value, None, rank=0, mode="C", phase="C/first").line
    assert line is not None and line.file == __file__
