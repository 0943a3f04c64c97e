"""What torch logs of a graph break -> the line that the user can change, or none."""

from __future__ import annotations

from tpcompile.evidence.text.breaks import parse_break

TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"


def text(file: str, *, caller: str = "") -> str:
    frames = f'  File "{caller}", line 9, in step\n    y = model(x)\n' if caller else ""
    return (
        f"Graph break in user code at {file}:4\nGraph Break Reason: Unsupported\nUser code traceback:\n"
        f'{frames}  File "{file}", line 4, in forward\n    print(x)\n'
    )


def test_a_break_stands_at_its_own_line() -> None:
    found = parse_break(text("/app/model.py", caller="/app/train.py"))
    assert (found.reason, str(found.line)) == ("Unsupported", "/app/model.py:4 in forward")


def test_a_break_inside_of_torch_stands_at_the_line_that_called_it() -> None:
    assert str(parse_break(text(TORCH, caller="/app/train.py")).line) == "/app/train.py:9 in step"


def test_a_break_inside_of_torch_with_no_known_caller_has_no_line() -> None:
    assert parse_break(text(TORCH)).line is None
