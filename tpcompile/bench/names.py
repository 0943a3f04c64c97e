"""Name of a program -> its base, its variants and its role; whether it can run here, decided without torch."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from tpcompile.bench.records import Role
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError

GRAPHED, AUTOTUNED, ONE_SHOT, BY_SIZE = "graphed", "max-autotune", "one-shot", "by-size"
VARIANTS = {
    GRAPHED: "the whole step in one CUDA graph",
    AUTOTUNED: "kernels chosen by their times on the first rank, the same on all ranks",
    ONE_SHOT: "Inductor's one-shot all-reduce through symmetric memory",
    BY_SIZE: "each all-reduce by the algorithm that was measured to be fastest at its size",
}
ROLES = {
    "eager": Role.MODE, "A": Role.MODE, "B": Role.MODE,
    "C": Role.OURS, "C+fast": Role.OURS, "C+fast-all": Role.OURS,
    "dtensor": Role.PEER, "dtensor_sp": Role.PEER, "async_tp": Role.PEER, "hooks": Role.PEER, "transformers": Role.PEER,
    "compute": Role.COMPUTE,
}  # fmt: skip
PLAIN_PEERS = ("dtensor", "dtensor_sp", "async_tp", "hooks")
"""Those that are made of the plain module."""
ONE_GRAPH = ("B", "C", "C+fast", "C+fast-all", "compute")
"""A call of these enters one compiled region, or the run fails."""
DEFAULT = (
    "eager", "A", "B",
    "C", "C:graphed", "C:max-autotune:graphed", "C:one-shot:graphed", "C:by-size:graphed", "C+fast", "C+fast:graphed",
    "C+fast:one-shot:graphed", "C+fast:by-size:graphed", "C+fast-all:graphed", "C+fast-all:one-shot:graphed",
    "dtensor", "dtensor:graphed", "dtensor_sp", "dtensor_sp:graphed", "async_tp", "async_tp:graphed",
    "hooks", "hooks:graphed", "transformers", "transformers:graphed",
    "compute", "compute:graphed",
)  # fmt: skip
ONE_SHOT_TOKENS = 256
"""More take longer than NCCL: 2.4 times the whole step at 4680 tokens on 8 H200."""
_OWN = re.compile(r"[\w.]+:\w+")
_NOT_PLAIN = {
    "norm": "rms", "norm_affine": True, "modulation": False, "cross_attention": False, "masked": False,
    "sequence_parallel": False, "dropout": 0.0,
}  # fmt: skip
"""The forms of the block that peers are written for."""


@dataclass(frozen=True)
class Name:
    """`BASE[:VARIANT...]`, or `package.module:function` of the user's own."""

    text: str
    base: str
    variants: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Name:
        """Raises ConfigError for a name that there is not."""
        base, *variants = text.split(":")
        if base in ROLES and set(variants) <= set(VARIANTS) and len(set(variants)) == len(variants):
            return cls(text, base, tuple(variants))
        if base not in ROLES and "." in base and _OWN.fullmatch(text):
            return cls(text, text)
        raise ConfigError(
            f"--program {text}: write one of {', '.join(ROLES)}, and after a colon {', '.join(VARIANTS)}, "
            "such as C:graphed; or package.module:function of your own"
        )

    @property
    def is_own(self) -> bool:
        """Of the user, by a function."""
        return self.base not in ROLES

    @property
    def role(self) -> Role:
        """A user's own is compared as a peer."""
        return ROLES.get(self.base, Role.PEER)

    @property
    def has_one_graph(self) -> bool:
        """Whether a call has to enter one compiled region."""
        return self.base in ONE_GRAPH

    @property
    def is_alone(self) -> bool:
        """Prepared while no other program runs, since it times kernels to choose between them."""
        return AUTOTUNED in self.variants


def why_not(name: Name, block: BlockConfig, *, is_gpu: bool, backend: str, train: bool, tp: int) -> str:
    """Why the program cannot run, in one line; empty when it may."""
    if {ONE_SHOT, BY_SIZE} <= set(name.variants):
        return "one-shot and by-size are two settings of the same sums; give one"
    if not is_gpu and (name.base == "async_tp" or {GRAPHED, ONE_SHOT, BY_SIZE} & set(name.variants)):
        return "needs GPUs"
    if name.base == "eager" and name.variants and name.variants != (GRAPHED,):
        return "eager compiles nothing; only eager:graphed is there"
    if name.base == "A" and GRAPHED in name.variants:
        return "mode A stands for code that breaks the graph at every collective; C:graphed is the fix"
    if backend != "inductor" and ({AUTOTUNED, ONE_SHOT, BY_SIZE} & set(name.variants) or name.base == "async_tp"):
        return f"needs Inductor, and compile.backend is {backend}"
    if ONE_SHOT in name.variants and block.batch * block.seq_len > ONE_SHOT_TOKENS:
        return f"one-shot is for up to {ONE_SHOT_TOKENS} tokens, and there are {block.batch * block.seq_len}"
    if name.base in (*PLAIN_PEERS, "transformers"):
        return _why_no_peer(name.base, block, train=train, tp=tp)
    return ""


def _why_no_peer(base: str, block: BlockConfig, *, train: bool, tp: int) -> str:
    others = {key: getattr(block, key) for key, plain in _NOT_PLAIN.items() if getattr(block, key) != plain}
    if others:
        return f"peers have no {', '.join(f'{key}={value}' for key, value in others.items())}"
    if block.num_kv_heads % tp or block.num_heads % tp or block.ffn_dim % tp:
        return f"peers need heads, kv heads and ffn_dim that tp={tp} divides"
    if base in ("dtensor_sp", "async_tp") and block.seq_len % tp:
        return f"tp={tp} does not divide {block.seq_len} tokens"
    if base == "hooks" and train:
        return "these hooks are for inference: the gradient of their all-reduce is not that of the sum"
    return _why_no_transformers(block) if base == "transformers" else ""


def _why_no_transformers(block: BlockConfig) -> str:
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    is_llama = block.style == "llama" and block.causal and not block.bias and block.rope == "half"
    if not is_llama or block.qk_norm == "full":
        return "its Llama and Qwen3 have no such block; llama8b is one"
    return ""
