"""A model's config, an object or a dict -> its fields, or one clear refusal of what is not supported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tpcompile.block_args import BlockArgs
from tpcompile.errors import ConfigError

_REQUIRED = object()


def read(config: Any, name: str, default: Any = _REQUIRED) -> Any:
    """Field of a config object or dict; raises ConfigError when it is absent and there is no default."""
    value = config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
    if value is _REQUIRED:
        raise ConfigError(f"the model's config has no {name!r}; pass its config.json as a dict, or its config object")
    return value


def num_layers(config: Any) -> int:
    """Blocks of the model, of any family."""
    return read(config, "num_hidden_layers", None) or read(config, "num_layers")


def refuse_others(config: Any, family: str, supported: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigError naming every field whose value is not among `supported[field]`; the first is its default."""
    bad = []
    for name, values in supported.items():
        value = read(config, name, values[0])
        if value not in values:
            accepted = ", ".join(map(repr, values))
            bad.append(f"{name}={value!r} (supported: {accepted})")
    if bad:
        raise ConfigError(f"this {family} checkpoint is not supported: {'; '.join(bad)}")


def build(family: str, **fields: Any) -> BlockArgs:
    """BlockArgs, with ConfigError for fields that do not fit together."""
    try:
        return BlockArgs.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "sizes"
        raise ConfigError(f"{family}: {where}: {first['msg']}") from None
