"""CausalLM on 1, 2 and 4 gloo ranks against transformers' own Llama and Qwen3, made from a config, no download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from examples.checkpoints import llama, num_layers, qwen3
from tests.graphs import GraphCapture
from tests.nn.declared import declared_cross_entropy
from tests.profiles.recorder import Recorder
from tpcompile.collectives.strategies import Collectives
from tpcompile.evidence.records import Collective
from tpcompile.nn.causal_lm import CausalLM, left_padded
from tpcompile.nn.state import full_state_dict, gather_full, load_full_state_dict
from tpcompile.profiles.graphed import Graphed
from tpcompile.profiles.steps import Steps
from tpcompile.testing import run_on_ranks

pytestmark = pytest.mark.long

BATCH, TOKENS, PROMPT, NEW = 2, 8, 3, 5
SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 8}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# On 4 ranks the first two have fewer kv heads than ranks; no vocabulary is divisible by 4. The first has two layers.
FORMS: dict[str, dict[str, Any]] = {
    "llama": {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 51, "attention_bias": True, "mlp_bias": True,
    },
    "llama tied": {"num_key_value_heads": 1, "vocab_size": 50, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "qwen3": {"num_key_value_heads": 4, "vocab_size": 51, "head_dim": 12},
}  # fmt: skip
RANKS = (1, 2, 4)
COMPILED_TOKENS = "qwen3"
PADDED = ("llama", "qwen3")  # a tied head of one layer repeats a token, whatever it has read
COMPILED_LOSS = [("llama tied", False), ("qwen3", True)]  # form, whether it is sequence parallel
TOLERANCE = 1e-5  # relative to the largest element, float32 on both sides


class MinCutCapture(GraphCapture):
    """Partitions as Inductor does: the default partitioner leaves dead code in the backward, a collective included."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        self.texts.append(("dynamo", graph.print_readable(print_output=False)))
        compilers = {"fw_compiler": self._keep("forward"), "bw_compiler": self._keep("backward")}
        return aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)(graph, inputs)


class RankAsNumber(Collectives):
    """Lets compiled code read the rank as a Python number."""

    def rank_index(self, device: torch.device) -> Tensor:
        return torch.full((1,), self.rank, device=device)


def family_of(form: str) -> Any:
    return llama if form.startswith("llama") else qwen3


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def reference_of(form: str) -> dict[str, Any]:
    """Config, state dict, inputs and results of transformers' model, with weights that nothing is trivial in."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = (
        (LlamaConfig, LlamaForCausalLM) if form.startswith("llama") else (Qwen3Config, Qwen3ForCausalLM)
    )
    # A pad_token_id would hold the gradient of its row at zero, in transformers only.
    common = {"max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = config_class(**SIZES | common | FORMS[form])
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.1 if name.endswith("bias") else parameter.shape[-1] ** -0.5))
    ids = torch.randint(config.vocab_size, (BATCH, TOKENS), generator=generator)
    out = model(ids, labels=ids)
    out.loss.backward()
    prompt = ids[:, :PROMPT]
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
    return {
        "config": config.to_dict(),
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "ids": ids,
        "logits": out.logits.detach(),
        "loss": out.loss.detach(),
        "grads": {name: parameter.grad.clone() for name, parameter in model.named_parameters()},
        "tokens": tokens,
    }


def build(form: str, reference: dict[str, Any], comm: Collectives, **options: Any) -> CausalLM:
    family, config = family_of(form), reference["config"]
    with torch.device("meta"):
        sizes = {"num_layers": num_layers(config), "vocab_size": config["vocab_size"]}
        args = family.block_args(config, uneven="pad", **options)
        model = CausalLM(args, comm, **sizes, tied=config["tie_word_embeddings"])
    model.to_empty(device="cpu")
    load_full_state_dict(model, family.key_map(config).to_full(reference["state"]))
    return model


def shifted(ids: Tensor) -> Tensor:
    """Targets as transformers makes them of labels."""
    return torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)


def compare(form: str, reference: dict[str, Any], comm: Collectives, **options: Any) -> dict[str, float]:
    """Relative errors of logits, loss and gradients, these by transformers' names."""
    model, family, config = build(form, reference, comm, **options), family_of(form), reference["config"]
    ids, tables = reference["ids"], family.rope_tables(config, TOKENS)
    errors = {"logits": relative_error(model.logits(ids, *tables), reference["logits"])}
    loss = model.loss(ids, shifted(ids), *tables)
    loss.backward()
    errors["loss"] = relative_error(loss.detach(), reference["loss"])
    grads = {name: gather_full(name, p.grad, module=model) for name, p in model.named_parameters()}
    ours = family.key_map(config).to_checkpoint(grads)
    assert set(ours) == set(reference["grads"])
    return errors | {name: relative_error(ours[name], grad) for name, grad in reference["grads"].items()}


def generate(form: str, reference: dict[str, Any], comm: Collectives) -> Tensor:
    model, tables = build(form, reference, comm), family_of(form).rope_tables(reference["config"], PROMPT + NEW)
    return model.generate(reference["ids"][:, :PROMPT], *tables, num_new_tokens=NEW)


def generate_compiled(form: str, reference: dict[str, Any], comm: Collectives) -> dict[str, Any]:
    """Tokens twice, and the graphs after the first and the second time."""
    model, tables = build(form, reference, comm), family_of(form).rope_tables(reference["config"], PROMPT + NEW)
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    caches = model.new_caches(BATCH, PROMPT + NEW)
    model.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    found: dict[str, Any] = {}
    for run in ("first", "second"):
        found[run] = model.generate(reference["ids"][:, :PROMPT], *tables, num_new_tokens=NEW, caches=caches)
        found[f"graphs {run}"] = stats["unique_graphs"]
    return found


def generate_replayed(form: str, reference: dict[str, Any], comm: Collectives) -> dict[str, Any]:
    """Tokens by a step that is captured, after prompts of two lengths, and the same without it."""
    model, tables = build(form, reference, comm), family_of(form).rope_tables(reference["config"], PROMPT + NEW)
    prompts = [reference["ids"][:, :PROMPT], reference["ids"][:, 1:PROMPT]]
    step = Graphed(model.next_tokens, Recorder(), label="step", ranks=Steps("step", "graphed", None), modules=(model,))
    caches = model.new_caches(BATCH, PROMPT + NEW)
    options = {"num_new_tokens": NEW, "caches": caches}
    return {
        "replayed": [model.generate(prompt, *tables, **options, step=step) for prompt in prompts],
        "called": [model.generate(prompt, *tables, **options) for prompt in prompts],
        "captures": step.num_captures,
    }


def generate_padded(form: str, reference: dict[str, Any], comm: Collectives, *, is_compiled: bool) -> dict[str, Any]:
    """Tokens after prompts of different length: one at a time, together, and together without the mask."""
    length = PROMPT + 2
    prompts = [reference["ids"][0, :PROMPT], reference["ids"][1, :length], reference["ids"][0, 2:3]]
    model, tables = build(form, reference, comm), family_of(form).rope_tables(reference["config"], length + NEW)
    alone = [model.generate(prompt[None], *tables, num_new_tokens=NEW)[0, -NEW:] for prompt in prompts]
    ids, is_token = left_padded(prompts, pad_id=1)
    unmasked = model.generate(ids, *tables, num_new_tokens=NEW)
    if is_compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters["stats"].clear()
        model.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    together = model.generate(ids, *tables, num_new_tokens=NEW, is_token_BS=is_token)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if is_compiled else 0
    return {"alone": torch.stack(alone), "together": together, "unmasked": unmasked, "ids": ids, "graphs": graphs}


def compiled(form: str, reference: dict[str, Any], comm: Collectives, **options: Any) -> dict[str, Any]:
    """Graphs of `loss`, and how they differ in value from eager."""
    torch._dynamo.reset()
    model, ids = build(form, reference, comm, **options), reference["ids"]
    tables, capture = family_of(form).rope_tables(reference["config"], TOKENS), MinCutCapture()
    eager = model.loss(ids, shifted(ids), *tables)
    loss = torch.compile(model.loss, backend=capture, fullgraph=True, dynamic=False)(ids, shifted(ids), *tables)
    loss.backward()
    fields = ("phase", "op", "reduce_op", "dtype", "shape")
    rows = [tuple(getattr(each, field) for field in fields) for each in declared_of_loss(model)]
    return {
        "texts": capture.texts,
        "collectives": capture.collectives,
        "declared": rows,
        "error": relative_error(loss.detach(), eager.detach()),
    }


def declared_of_loss(model: CausalLM) -> tuple[Collective, ...]:
    """What the parts of the model declare for `loss` of a batch in training, in order."""
    weight = model.embedding.weight
    tokens = (TOKENS, BATCH) if model.sequence_parallel else (BATCH, TOKENS)
    shape = (*tokens, weight.shape[1])
    total = model.embedding.declared(tokens)
    for layer in model.stack.layers:
        total = total.then(layer.declared(shape, shape, weight.dtype))
    total = total.then(model.norm.declared(weight.dtype)).then(model.head.declared(shape, weight.dtype))
    return total.then(declared_cross_entropy(BATCH * TOKENS, weight.dtype)).select(train=True)


def break_weights(form: str, reference: dict[str, Any], comm: Collectives) -> dict[str, float]:
    """Relative errors of the logits when one thing is wrong."""
    ids, tables = reference["ids"], family_of(form).rope_tables(reference["config"], TOKENS)
    full = family_of(form).key_map(reference["config"]).to_full(reference["state"])
    errors = {}
    for name in ("attention.wqkv", "mlp.gate_up"):
        model = build(form, reference, comm)
        key = f"stack.layers.0.{name}.weight"
        with torch.no_grad():
            model.get_parameter(key).copy_(full[key].chunk(comm.size)[comm.rank])
        errors[name] = relative_error(model.logits(ids, *tables), reference["logits"])
    model = build(form, reference, comm, rope="interleaved")
    errors["rope"] = relative_error(model.logits(ids, *tables), reference["logits"])
    tokens = model.generate(ids[:, :PROMPT], *tables, num_new_tokens=NEW)
    errors["rope, tokens"] = (tokens != reference["tokens"]).float().mean().item()
    return errors


@torch.no_grad()
def rank_as_number(form: str, reference: dict[str, Any], comm: Collectives) -> list[tuple[str, str]]:
    """Graph texts of a forward that reads the rank as a Python number."""
    torch._dynamo.reset()
    capture = GraphCapture()
    model = build(form, reference, RankAsNumber(comm.group))
    torch.compile(model, backend=capture)(reference["ids"], *family_of(form).rope_tables(reference["config"], TOKENS))
    return capture.texts


def _worker(references: dict[str, dict[str, Any]]) -> dict[Any, Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    comms = {1: Collectives(None), 2: Collectives(pairs[dist.get_rank() // 2]), 4: Collectives(dist.group.WORLD)}
    found: dict[Any, Any] = {}
    for form, reference in references.items():
        for tp, comm in comms.items():
            if tp == 1 and dist.get_rank() > 0:
                continue  # all would compute the same
            found[form, tp, "plain"] = compare(form, reference, comm)
            found[form, tp, "sequence parallel"] = compare(form, reference, comm, sequence_parallel=True)
            if dist.get_rank() < tp:
                found[form, tp, "tokens"] = generate(form, reference, comm)
        if dist.get_rank() < 2:
            found[form, "replayed"] = generate_replayed(form, reference, comms[2])
        if dist.get_rank() < 2 and form in PADDED:
            is_compiled = form == COMPILED_TOKENS
            found[form, "padded"] = generate_padded(form, reference, comms[2], is_compiled=is_compiled)
        model = build(form, reference, comms[4])
        ours = family_of(form).key_map(reference["config"]).to_checkpoint(full_state_dict(model))
        found[form, "differing"] = [k for k, v in ours.items() if not torch.equal(v, reference["state"][k])]
        found[form, "returned"] = sorted(ours)
        found[form, "kept"] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for form, is_sequence_parallel in COMPILED_LOSS if dist.get_rank() < 2 else ():
        options = {"sequence_parallel": is_sequence_parallel}
        found[form, "compiled"] = compiled(form, references[form], comms[2], **options)
    if dist.get_rank() < 2:
        found["compiled tokens"] = generate_compiled(COMPILED_TOKENS, references[COMPILED_TOKENS], comms[2])
        found["rank as number"] = rank_as_number("qwen3", references["qwen3"], comms[2])
    found["broken"] = break_weights("qwen3", references["qwen3"], comms[2])
    return found


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    return {form: reference_of(form) for form in FORMS}


@pytest.fixture(scope="module")
def ranks(references: dict[str, dict[str, Any]]) -> list[dict[Any, Any]]:
    return run_on_ranks(_worker, references, world_size=4, timeout_s=240)


def with_results(ranks: list[dict[Any, Any]], tp: int) -> list[dict[Any, Any]]:
    """The ranks that have computed something of their own."""
    return ranks[:1] if tp == 1 else ranks


@pytest.mark.parametrize("layout", ["plain", "sequence parallel"])
@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_logits_loss_and_gradients_are_those_of_transformers(
    ranks: list[dict[Any, Any]], form: str, tp: int, layout: str
) -> None:
    for found in with_results(ranks, tp):
        errors = found[form, tp, layout]
        assert {"logits", "loss", "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"} <= set(errors)
        assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_are_those_of_transformers(
    ranks: list[dict[Any, Any]], references: dict[str, dict[str, Any]], form: str, tp: int
) -> None:
    expected = references[form]["tokens"]
    assert expected.shape == (BATCH, PROMPT + NEW)
    for found in ranks[:tp]:
        assert torch.equal(found[form, tp, "tokens"], expected)


def test_compiled_generation_is_two_graphs_for_any_number_of_calls(
    ranks: list[dict[Any, Any]], references: dict[str, dict[str, Any]]
) -> None:
    expected = references[COMPILED_TOKENS]["tokens"]
    for rank in ranks[:2]:
        found = rank["compiled tokens"]
        assert torch.equal(found["first"], expected)
        assert torch.equal(found["second"], expected)
        assert (found["graphs first"], found["graphs second"]) == (2, 2)


@pytest.mark.parametrize("form", FORMS)
def test_a_replayed_step_gives_the_same_tokens_and_one_capture_serves_prompts_of_any_length(
    ranks: list[dict[Any, Any]], form: str
) -> None:
    for rank in ranks[:2]:
        found = rank[form, "replayed"]
        assert all(map(torch.equal, found["replayed"], found["called"]))
        assert found["captures"] == 1


@pytest.mark.parametrize("form", PADDED)
def test_prompts_of_different_length_are_continued_as_each_alone(ranks: list[dict[Any, Any]], form: str) -> None:
    for found in ranks[:2]:
        padded = found[form, "padded"]
        num_prompt = padded["ids"].shape[1]
        assert torch.equal(padded["together"][:, num_prompt:], padded["alone"])
        assert torch.equal(padded["together"][:, :num_prompt], padded["ids"])
        assert not torch.equal(padded["unmasked"], padded["together"]), "the padding is read without the mask"


def test_compiled_generation_from_padded_prompts_is_two_graphs(ranks: list[dict[Any, Any]]) -> None:
    assert [rank[COMPILED_TOKENS, "padded"]["graphs"] for rank in ranks[:2]] == [2, 2]


@pytest.mark.parametrize("form", FORMS)
def test_state_dict_comes_back_from_four_ranks_bit_for_bit(
    ranks: list[dict[Any, Any]], references: dict[str, dict[str, Any]], form: str
) -> None:
    keys = set(references[form]["state"])
    if references[form]["config"]["tie_word_embeddings"]:
        keys.remove("lm_head.weight")
    for found in ranks:
        assert found[form, "differing"] == [] and found[form, "returned"] == sorted(keys)
        assert found[form, "kept"]["embedding.weight"] == (13, 32)


@pytest.mark.parametrize("form", [form for form, _ in COMPILED_LOSS])
def test_loss_is_one_graph_whose_text_is_equal_on_both_ranks(ranks: list[dict[Any, Any]], form: str) -> None:
    left, right = (found[form, "compiled"] for found in ranks[:2])
    assert [kind for kind, _ in left["texts"]] == ["dynamo", "forward", "backward"]
    assert left["texts"] == right["texts"]
    assert left["error"] < TOLERANCE


@pytest.mark.parametrize("form", [form for form, _ in COMPILED_LOSS])
def test_collectives_of_the_loss_are_the_declared_ones(ranks: list[dict[Any, Any]], form: str) -> None:
    found = [found[form, "compiled"] for found in ranks[:2]]
    assert all(len(rank["collectives"]) > 5 and rank["collectives"] == rank["declared"] for rank in found)


def test_graphs_that_read_the_rank_as_a_number_differ(ranks: list[dict[Any, Any]]) -> None:
    left, right = (found["rank as number"] for found in ranks[:2])
    assert [kind for kind, _ in left] == [kind for kind, _ in right] != [] and left != right


def test_declared_collectives_follow_the_form(ranks: list[dict[Any, Any]]) -> None:
    plain, sharded = ({row[1] for row in ranks[0][form, "compiled"]["declared"]} for form, _ in COMPILED_LOSS)
    assert plain == {"all_reduce"} and sharded == plain | {"all_gather_into_tensor", "reduce_scatter_tensor"}


@pytest.mark.parametrize("broken", ["attention.wqkv", "mlp.gate_up", "rope", "rope, tokens"])
def test_a_chunked_packed_weight_or_the_other_rope_gives_wrong_results(
    ranks: list[dict[Any, Any]], broken: str
) -> None:
    assert all(found["broken"][broken] > 1000 * TOLERANCE for found in ranks)
