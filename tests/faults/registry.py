"""What is declared: name -> fault, case or program, each kind in a registry of its own."""

from __future__ import annotations

from typing import Protocol, TypeVar

from tpcompile.errors import ConfigError


class Named(Protocol):
    """What can be declared."""

    @property
    def name(self) -> str:
        """Unique in its registry."""


T = TypeVar("T", bound=Named)


class Registry(dict[str, T]):
    """Name -> declaration, in the order of the declarations."""

    def __init__(self, kind: str, *, see: str = "") -> None:
        """`see` is what an error about an unknown name points to; by default it lists all names."""
        super().__init__()
        self.kind = kind
        self._see = see

    def add(self, declared: T) -> None:
        """Add a declaration. Raises ValueError when its name is taken."""
        if declared.name in self:
            raise ValueError(f"there are two {self.kind}s named {declared.name!r}")
        self[declared.name] = declared

    def find(self, name: str) -> T:
        """The declaration of that name. Raises ConfigError for an unknown one."""
        if name not in self:
            see = self._see or f"choose from {', '.join(sorted(self))}"
            raise ConfigError(f"unknown {self.kind} {name!r}; {see}")
        return self[name]
