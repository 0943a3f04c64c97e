"""All clients."""

from __future__ import annotations

from tests.clients.accelerate_ddp import cases as accelerate_ddp
from tests.clients.ddp import cases as ddp
from tests.clients.generate import cases as generate
from tests.clients.lightning_tp import cases as lightning_tp
from tests.clients.megatron import cases as megatron
from tests.clients.titan import cases as titan
from tests.clients.trainer import cases as trainer

CLIENTS = (
    ddp.CLIENT, accelerate_ddp.CLIENT, trainer.CLIENT, generate.CLIENT, lightning_tp.CLIENT, megatron.CLIENT,
    titan.CLIENT,
)  # fmt: skip
