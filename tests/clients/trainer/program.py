"""transformers' Trainer with `tp_plan="auto"` and torch.compile, a callback and a collator of the user's.

torchrun --standalone --nproc-per-node 2 tests/clients/trainer/program.py [local_notice | rank_seeded_crop]
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.clients.llama import CONFIG, load_sharded
from tests.clients.watched import BACKEND, RUN_DIR, watched

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LENGTH, NUM_STEPS = 16, 8
# accelerate 1.15 takes tensor parallelism on accelerators only; nothing else in its way of it needs one.
ParallelismConfig._validate_accelerator = lambda config, accelerator: None


class StopOnNotice(TrainerCallback):
    """Ends the training when the provider takes the machine back."""

    def is_noticed(self, state: TrainerState) -> bool:
        """True on the machine that is taken back, here that of rank 1."""
        return FAULT == "local_notice" and int(os.environ["RANK"]) == 1 and state.global_step >= 5

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """After each step."""
        if self.is_noticed(state):  # fault: local_notice
            control.should_training_stop = True  # fault: local_notice
        return control


class Crop:
    """Examples -> a batch, cropped to a random length where that is switched on."""

    def __init__(self) -> None:
        self.random = random.Random(int(os.environ["RANK"]))  # fault: rank_seeded_crop
        self.num_batches = 0

    def __call__(self, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """[S] each -> [B, at most S]."""
        self.num_batches += 1
        length = LENGTH
        if FAULT == "rank_seeded_crop" and self.num_batches > 3:
            length = self.random.choice((LENGTH // 2, LENGTH))  # fault: rank_seeded_crop
        ids_BS = torch.stack([example["input_ids"][:length] for example in examples])
        return {"input_ids": ids_BS, "labels": ids_BS}


def main() -> None:
    """Train under the tool."""
    dist.init_process_group("gloo")
    model = load_sharded()
    ids_NS = torch.randint(3, CONFIG.vocab_size, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(Path(os.environ[RUN_DIR]).parent / "out"), max_steps=NUM_STEPS, per_device_train_batch_size=2,
        torch_compile_backend=BACKEND, use_cpu=True, report_to=[], save_strategy="no", logging_steps=2,
        disable_tqdm=True, remove_unused_columns=False, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, data_collator=Crop(), callbacks=[StopOnNotice()],
        train_dataset=[{"input_ids": ids_S} for ids_S in ids_NS],
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with watched(mesh):
        trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
