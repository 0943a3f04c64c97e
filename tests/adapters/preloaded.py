"""What the programs import beside torch; imported by the server of forks."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed.fsdp  # noqa: F401

with suppress(ImportError):
    import transformers.distributed.configuration_utils  # noqa: F401
    from transformers import LlamaForCausalLM, MixtralForCausalLM, Qwen3ForCausalLM  # noqa: F401
with suppress(ImportError):
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock  # noqa: F401
