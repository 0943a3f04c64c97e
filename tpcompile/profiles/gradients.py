"""A program -> the parameters whose gradients it may compute, and where those are before, in and after a capture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tpcompile.errors import ConfigError


def modules_of(program: Callable[..., Any]) -> tuple[nn.Module, ...]:
    """The module itself; for a method its object, for a function the modules that it names."""
    candidates = [program, getattr(program, "__self__", None), getattr(program, "func", None)]
    function = inspect.unwrap(program)
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        candidates += [*named.nonlocals.values(), *named.globals.values()]
        candidates += [getattr(value, "__self__", None) for value in named.nonlocals.values()]
    found = {id(value): value for value in candidates if isinstance(value, nn.Module)}
    return tuple(found.values())


class Gradients:
    """`.grad` of the parameters around warm-up calls and a capture.

    The replays of a graph write where the gradients were at its capture, and a new tensor in `.grad` would never see
    it. So they are allocated before, stay where they are, and warm-up calls leave no trace in them.
    """

    def __init__(self, modules: tuple[nn.Module, ...], label: str) -> None:
        self._label = label
        self._parameters: dict[str, nn.Parameter] = {}
        self._before: dict[str, Tensor | None] = {}
        self._during: dict[str, Tensor | None] = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                if not parameter.requires_grad:
                    continue
                grad = parameter.grad
                self._parameters[name] = parameter
                self._before[name] = None if grad is None else grad.detach().clone()

    def restore(self) -> None:
        """Restore the values of before the warm-up; zeros where the warm-up made a gradient."""
        for name, parameter in self._parameters.items():
            grad, before = parameter.grad, self._before[name]
            self._during[name] = grad
            if grad is None:
                continue
            if before is None:
                grad.zero_()
            else:
                grad.copy_(before)
        self._before.clear()

    def check(self) -> None:
        """Raise ConfigError when the program has replaced gradients since `restore`."""
        moved = [name for name, each in self._parameters.items() if each.grad is not self._during[name]]
        if moved:
            raise ConfigError(
                f"{self._label} replaces the gradients of {len(moved)} parameters ({moved[0]}, ...); a CUDA graph "
                "writes where they were: zero them in place (zero_grad(set_to_none=False)), or return them"
            )
