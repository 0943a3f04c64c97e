"""Programs as their users write them, with tpcompile around the training step; docs/adapters.md has what each gives.

torchrun --standalone --nproc-per-node 2 -m examples.adapters.dtensor_plan
"""
