"""Arguments of the modules in `tpcompile.nn`: what a block is made of, without torch and without a workload."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tpcompile.errors import ConfigError


class BlockArgs(BaseModel):
    """Sizes and form of a transformer block, immutable; every field changes what is compiled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    style: Literal["wan", "llama"]
    """`wan`: GELU-tanh MLP, biases; `llama`: SwiGLU MLP, grouped-query attention."""
    dim: int = Field(gt=0)
    """Model width D."""
    num_heads: int = Field(gt=0)
    """Query heads H."""
    num_kv_heads: int = Field(gt=0)
    """Key and value heads; equal to num_heads unless grouped-query."""
    ffn_dim: int = Field(gt=0)
    """Hidden width of the MLP."""
    qk_norm: Literal["full", "per_head", "none"]
    """RMSNorm of q and k: over the full hidden size (one packed all-reduce under TP), per head, or none."""
    bias: bool
    """Biases on all linears; a row-parallel bias is added after the reduce."""
    causal: bool
    """Causal mask in attention."""
    eps: float = Field(gt=0)
    """Epsilon of every RMSNorm."""
    dtype: Literal["float32", "bfloat16", "float64"]
    """dtype of weights and activations."""
    head_size: int | None = Field(default=None, gt=0)
    """Size of one head, E; None is dim / num_heads."""
    rope: Literal["half", "interleaved"] = "half"
    """Which elements of a head RoPE pairs: i with i + E / 2 (Llama), or 2i with 2i + 1 (Wan)."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm before attention and MLP: RMSNorm (Llama) or LayerNorm (Wan)."""
    norm_affine: bool = True
    """True for norms with weights; Wan's have none, the modulation scales and shifts instead."""
    modulation: bool = False
    """adaLN: the block takes [B, 6, D] (shift, scale, gate of attention, then of the MLP) and adds its own table."""
    cross_attention: bool = False
    """A second attention, between the first and the MLP, that reads a context [B, T, D]."""
    uneven: Literal["refuse", "pad"] = "refuse"
    """What to do when tp does not divide kv heads or ffn_dim: refuse, or fill the last ranks up with heads of zeros."""
    sequence_parallel: bool = False
    """Activations between the linears are sharded over tokens, [S / tp, B, D], instead of replicated."""
    attention_backend: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """What computes attention. `auto` leaves it to the torch of each rank, by its settings, GPU and shapes; a name is
    the same on all ranks, or an error. float64, in which references compute, is left to torch."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an element of the MLP's hidden activations and of each residual branch."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.head_size is None and self.dim % self.num_heads:
            raise ValueError(f"dim={self.dim} is not divisible by num_heads={self.num_heads}; or give head_size")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd; RoPE rotates pairs")
        return self

    @property
    def head_dim(self) -> int:
        """Size of one head, E."""
        return self.head_size or self.dim // self.num_heads

    def kv_replicas(self, tp: int) -> int:
        """How many neighbouring ranks hold the same kv head: 1 unless tp exceeds the number of kv heads."""
        return max(1, tp // self.num_kv_heads)

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError naming the tp sizes that work, unless heads, kv heads and ffn_dim can be spread over `tp`.

        `tp` must divide num_kv_heads, or be a multiple of it that divides num_heads (kv heads are replicated then), and
        divide ffn_dim. With uneven="pad" any tp up to num_kv_heads will do.
        """
        bad = self._not_divided(tp)
        if not bad:
            return
        numbers = ", ".join(f"{name}={getattr(self, name)}" for name in bad)
        padded = self.model_copy(update={"uneven": "pad"})
        hint = "" if padded._not_divided(tp) else ' (or set uneven="pad")'
        good = [size for size in range(1, self.num_heads + 1) if not self._not_divided(size)]
        raise ConfigError(f"tp={tp} does not divide {numbers}; choose tp from {good}{hint}")

    def _not_divided(self, tp: int) -> list[str]:
        """Names of the sizes that cannot be spread over `tp`."""
        is_replicated = tp > self.num_kv_heads
        remainders = {
            "num_heads": self.num_heads % tp,
            "num_kv_heads": tp % self.num_kv_heads if is_replicated else self.num_kv_heads % tp,
            "ffn_dim": self.ffn_dim % tp,
        }
        if self.uneven == "pad":
            del remainders["ffn_dim"]
            if not is_replicated:
                return []
        return [name for name, remainder in remainders.items() if remainder]
