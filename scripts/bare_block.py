"""The block without the gate: what a user's own script does to compile and run it. Yardstick of bench_gate.py.

    torchrun --standalone --nproc-per-node 2 scripts/bare_block.py --preset cpu_smoke

Same weights, input and calls as mode C (first call, steady calls, a different length); no capture, reference
or verdict.
"""

import argparse
import os

import torch
import torch.distributed as dist

from tpcompile import config
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights


def main() -> None:
    """Compile and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="cpu_smoke")
    parser.add_argument("--train", action="store_true")
    args = parser.parse_args()
    settings = config.load(args.preset)
    block = settings.block
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    dtype = getattr(torch, block.dtype)
    with torch.device("meta"):
        stack = TransformerStack(block, Collectives(dist.group.WORLD), num_layers=block.num_layers)
    stack = stack.to_empty(device=device)
    load_full_state_dict(stack, draw_stack_weights(block, seed=0, dtype=dtype, device=device))
    compiled = torch.compile(stack)
    calls = [block.seq_len] * (1 + settings.gate.steady_calls) + [settings.resized_seq_len] * 3
    for seq_len in calls:
        inputs = draw_inputs(block, seed=1, device=device, dtype=dtype, seq_len=seq_len)
        with torch.set_grad_enabled(args.train):
            y = compiled(inputs[0].requires_grad_(args.train), *inputs[1:])
            if args.train:
                y.backward(torch.ones_like(y))
    if cuda:
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
