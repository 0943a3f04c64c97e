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


def skipped(file: str) -> str:
    """A function that Dynamo does not trace, called by the user."""
    explanation = f"Explanation: Dynamo developers have intentionally marked that the function `step` in file `{file}`"
    return text("/app/train.py").replace("Unsupported\n", f"Unsupported\n  {explanation} should not be traced.\n")


def test_a_break_in_code_of_a_package_or_in_a_function_of_it_is_the_librarys() -> None:
    assert parse_break(text(TORCH, caller="/app/train.py")).library == "torch/nn/modules/module.py:4"
    scheduler = TORCH.replace("nn/modules/module.py", "optim/lr_scheduler.py")
    assert parse_break(skipped(scheduler)).library == "torch/optim/lr_scheduler.py"
    other = "/venv/lib/python3.11/site-packages/somewhere/layer.py"
    assert parse_break(text(other, caller="/app/train.py")).library == "somewhere/layer.py:4"


def test_a_break_in_the_users_code_or_in_a_function_of_it_is_the_users() -> None:
    for of_user in (text("/app/model.py"), skipped("/app/metrics.py"), skipped("/usr/lib/python3.11/logging/x.py")):
        assert parse_break(of_user).library == ""
