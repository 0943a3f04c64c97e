"""A stack of our block in the sequence-parallel form, two layers; training."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.block_forms import form_config
from tests.faults.drawn import frame
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights

# place: file

SMALL = {"dim": 48, "num_heads": 6, "num_kv_heads": 6, "ffn_dim": 96, "num_layers": 2, "batch": 2, "seq_len": 12}


class Regressor(nn.Module):
    def __init__(self, stack: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stack = stack
        self.group = group

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # tag: entered
        # place: region x=x module=self group=self.group
        x = self.stack(x, cos, sin)  # tag: entered
        # place: region x=x module=self group=self.group
        return x.square().mean()


def main() -> None:
    job = frame.start()
    # place: setup
    config = BlockConfig.model_validate(form_config("sp llama", "cpu").model_dump() | SMALL)
    full = draw_stack_weights(config, seed=0, dtype=torch.float32, device=job.device)
    with torch.device("meta"):
        stack = TransformerStack(config, Collectives(job.group), num_layers=config.num_layers)
    stack = stack.to_empty(device=job.device)
    load_full_state_dict(stack, full)
    model = Regressor(stack, job.group)
    # place: built model=model layers=model.stack.layers
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    # place: compiled model=model layers=model.stack.layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with job.watching():
        for step in range(job.num_steps):
            x, cos, sin, *_ = draw_inputs(
                config, seed=step, device=job.device, dtype=torch.float32, seq_len=config.seq_len
            )
            # place: loop x=x real=x batch=x half=x model=model
            loss = compiled(x, cos, sin)  # site: call
            # place: called model=model again=compiled(x,cos,sin) loss=loss
            loss.backward()  # site: backward
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
