"""Well-typed programs raise no alarm: hand-written ones, and every form of the block and the model ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.test_block import CASES, config_of
from tests.typecheck.programs import CLEAN, LOCAL, TOKENS, VOCABULARY, WIDTH, built, vocabulary_loss
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.nn.cache import KVCache
from tpcompile.nn.dropout import Dropout
from tpcompile.nn.embedding import ParallelEmbedding, ParallelLMHead
from tpcompile.nn.loss import vocab_parallel_cross_entropy
from tpcompile.numerics.draw import draw_inputs
from tpcompile.typecheck import Report, check_types

F64 = torch.float64
ACTIVATIONS = ("x_BSD", "modulation_B6D", "context")


def _inputs(form: str, qk_norm: str, device: str) -> BlockInputs:
    config = config_of(form, qk_norm)
    drawn = draw_inputs(config, seed=0, device="cpu", dtype=F64, seq_len=config.seq_len)
    inputs = BlockInputs(*(None if t is None else t.to(device) for t in drawn))
    for name in ACTIVATIONS:
        if getattr(inputs, name) is not None:
            getattr(inputs, name).requires_grad_()
    return inputs


def _stack(form: str, qk_norm: str, device: str = "cpu", **options: Any) -> Callable[[Collectives], nn.Module]:
    def build(comm: Collectives) -> nn.Module:
        with torch.device(device):
            return TransformerStack(config_of(form, qk_norm).model_copy(update=options), comm, num_layers=1)

    return build


def _assert_clean(report: Report) -> None:
    assert report.finding is None, str(report)
    assert report.num_ops > 0


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_form_of_the_block_is_clean_in_training(case: tuple[str, str], tp: int) -> None:
    _assert_clean(check_types(_stack(*case), _inputs(*case, "cpu"), tp=tp))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_form_of_the_block_is_clean_without_values(case: tuple[str, str]) -> None:
    """On meta tensors attention is written out, so other ops are followed than on CPU."""
    _assert_clean(check_types(_stack(*case, "meta"), _inputs(*case, "meta"), tp=4))


@pytest.mark.parametrize("train", [True, False])
def test_the_block_is_clean_with_dropout_and_without_gradients(train: bool) -> None:
    inputs = _inputs("wan", "full", "cpu")._replace(seed=torch.tensor([3]))
    _assert_clean(check_types(_stack("wan", "full", dropout=0.3), inputs, tp=4, train=train))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program[0].__name__)
def test_a_clean_program_raises_no_alarm(program: tuple[Any, Any, str, str], tp: int) -> None:
    forward, layouts, input_type, output_type = program
    x = torch.ones(2, TOKENS, WIDTH)
    build = built(forward, **layouts)
    _assert_clean(check_types(build, (x,), tp=tp, input_types=(input_type,), output_type=output_type))


def test_a_vocabulary_parallel_loss_is_clean() -> None:
    ids = torch.zeros(TOKENS, dtype=torch.long)
    _assert_clean(check_types(built(vocabulary_loss, **VOCABULARY), (ids, ids)))


class Ends(nn.Module):
    """Embedding, head and loss, the table tied."""

    def __init__(self, comm: Collectives, *, vocabulary: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        options: dict[str, Any] = {"comm": comm, "pad": True, "sequence_parallel": sequence_parallel}
        self.comm = comm
        self.embedding = ParallelEmbedding(vocabulary, WIDTH, **options)
        self.dropout = Dropout(0.2, site=1, comm=comm, sharded_dim=0 if sequence_parallel else None)
        self.head = ParallelLMHead(WIDTH, vocabulary, bias=True, **options)
        self.head.tie(self.embedding)

    def forward(self, ids: Tensor, targets: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.dropout(self.embedding(ids), seed))
        loss = vocab_parallel_cross_entropy(
            logits, targets, comm=self.comm, vocab_size=self.vocabulary, label_smoothing=0.1
        )
        return loss, self.head.gather(logits)


@pytest.mark.parametrize("vocabulary", [4 * LOCAL, 4 * LOCAL - 3], ids=["even", "padded"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ends_of_a_model_are_clean(vocabulary: int, sequence_parallel: bool) -> None:
    ids = torch.zeros(8, dtype=torch.long)
    _assert_clean(
        check_types(
            lambda comm: Ends(comm, vocabulary=vocabulary, sequence_parallel=sequence_parallel),
            (ids, ids, torch.tensor([1])),
        )
    )


class Decoder(nn.Module):
    """One decode step with a cache per block."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__()
        config = config_of("llama", "full", dtype="float64")
        self.stack = TransformerStack(config, comm, num_layers=config.num_layers)
        heads = config.num_kv_heads // comm.size
        self.caches = nn.ModuleList(KVCache(2, 8, heads, config.head_dim, dtype=F64) for _ in self.stack.layers)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        return self.stack(x, cos, sin, caches=list(self.caches), positions_S=positions)


def test_a_decode_step_is_clean() -> None:
    tables = torch.ones(1, 2, dtype=F64)
    inputs = (torch.ones(2, 1, 32, dtype=F64), tables, tables, torch.tensor([3]))
    _assert_clean(check_types(Decoder, inputs, tp=2, train=False))
