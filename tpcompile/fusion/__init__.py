"""Which kernels a graph became, what was fused into each, what was not and why."""
