"""`C+fast:graphed` or `FILE:FUNCTION:graphed` -> base, variants and role; which cannot run here. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tpcompile.bench.records import Role
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError

GRAPHED, AUTOTUNED, ONE_SHOT, BY_SIZE = "graphed", "max-autotune", "one-shot", "by-size"
VARIANTS = (GRAPHED, AUTOTUNED, ONE_SHOT, BY_SIZE)
ROLES = {
    "eager": Role.MODE, "A": Role.MODE, "B": Role.MODE,
    "C": Role.OURS, "C+fast": Role.OURS, "C+fast-all": Role.OURS,
    "compute": Role.COMPUTE,
}  # fmt: skip
DEFAULT = (
    "eager", "A", "B",
    "C", "C:graphed", "C:max-autotune:graphed", "C:one-shot:graphed", "C:by-size:graphed", "C+fast", "C+fast:graphed",
    "C+fast:one-shot:graphed", "C+fast:by-size:graphed", "C+fast-all:graphed", "C+fast-all:one-shot:graphed",
    "compute", "compute:graphed",
)  # fmt: skip
ONE_SHOT_TOKENS = 256
"""Most tokens for one-shot. With more it takes longer than NCCL: 2.4 times the whole step at 4680 tokens on 8 H200."""


@dataclass(frozen=True)
class Name:
    """`BASE[:VARIANT...]` of the block that ships, or `FILE:FUNCTION[:VARIANT...]` of a user's program."""

    text: str
    base: str
    variants: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Name:
        """Raises ConfigError for an unknown base or variant, and for a file that does not exist."""
        base, *variants = text.split(":")
        if base not in ROLES and variants:
            function, *variants = variants
            base = f"{base}:{function}" if function.isidentifier() and function not in VARIANTS else ""
        is_known = base in ROLES or ":" in base
        if not is_known or not set(variants) <= set(VARIANTS) or len(set(variants)) < len(variants):
            raise ConfigError(
                f"--program {text}: write one of {', '.join(ROLES)}, or FILE:FUNCTION of your own, and after a colon "
                f"{', '.join(VARIANTS)}, such as C:graphed"
            )
        file = base.partition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise ConfigError(f"--program {text}: there is no file {file}")
        return cls(text, base, tuple(variants))

    @property
    def role(self) -> Role:
        """A user's program is compared as a peer."""
        return ROLES.get(self.base, Role.PEER)

    @property
    def is_alone(self) -> bool:
        """It is compiled while no other program runs, since it times kernels to choose between them."""
        return AUTOTUNED in self.variants


def why_not(name: Name, block: BlockConfig, *, is_gpu: bool, backend: str) -> str:
    """Why the program cannot run, in one line; empty when it may."""
    variants = set(name.variants)
    num_tokens = block.batch * block.seq_len
    reasons = {
        "one-shot and by-size are two settings of the same sums; give one": {ONE_SHOT, BY_SIZE} <= variants,
        "needs GPUs": not is_gpu and variants & {GRAPHED, ONE_SHOT, BY_SIZE},
        "eager compiles nothing; only eager:graphed is there": name.base == "eager" and variants - {GRAPHED},
        "mode A stands for code that breaks the graph at every collective; C:graphed is the fix": (
            name.base == "A" and GRAPHED in variants
        ),
        f"needs Inductor, and compile.backend is {backend}": (
            backend != "inductor" and variants & {AUTOTUNED, ONE_SHOT, BY_SIZE}
        ),
        f"one-shot is for up to {ONE_SHOT_TOKENS} tokens, and there are {num_tokens}": (
            ONE_SHOT in variants and num_tokens > ONE_SHOT_TOKENS
        ),
    }
    return next((why for why, holds in reasons.items() if holds), "")
