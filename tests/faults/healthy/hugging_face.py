"""Models of transformers, made from a config, under the tensor-parallel plan that they bring."""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.healthy.program import Run, program

_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


def _run_model(run: Run, family: str, **sizes: int) -> None:
    import transformers  # seconds: only ranks that need it

    torch.manual_seed(run.draw.seed)
    sizes = _SIZES | {"num_key_value_heads": max(2, run.tp)} | sizes
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = _distributed(getattr(transformers, f"{family}ForCausalLM")(config).to(run.device), run.tp)
    compiled = run.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)  # tensors and DTensors do not mix in one
    for step in run.steps():
        ids = run.ids(step, run.draw.batch, run.draw.tokens, vocabulary=_SIZES["vocab_size"])
        with torch.set_grad_enabled(run.draw.train):
            found = compiled(input_ids=ids, labels=ids, use_cache=False)
        if run.draw.train:
            found.loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _distributed(model: Any, tp: int) -> Any:
    """What `from_pretrained(..., tp_plan="auto")` does to a model, without a checkpoint and without accelerate."""
    from transformers.distributed.configuration_utils import DistributedConfig

    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=tp))
    return model.maybe_distribute_model(model, settings, mesh)


@program(backends=("aot_eager", "inductor"))
def hugging_face_llama(run: Run) -> None:
    """Llama."""
    _run_model(run, "Llama")


@program(backends=("aot_eager",))
def hugging_face_qwen3(run: Run) -> None:
    """Qwen3, with norms of queries and keys."""
    _run_model(run, "Qwen3", head_dim=8)


@program(backends=("aot_eager",))
def hugging_face_mixtral(run: Run) -> None:
    """Mixtral: experts."""
    _run_model(run, "Mixtral", num_local_experts=4, num_experts_per_tok=2)
