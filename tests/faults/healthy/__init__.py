"""Healthy tensor-parallel programs that are drawn from a seed: the sentinel must raise no alarm in them.

program.py         a program, what is drawn for it, and its run on a rank
blocks.py          our transformer blocks
compiled.py        ways to use torch.compile
life.py            what else happens in a job: slow ranks, evaluation, checkpoints, data loaders, reset
uneven.py          what may differ between ranks
dtensors.py        DTensor plans, FSDP2
hugging_face.py    transformers under its own tensor-parallel plan
broken.py          the negative controls
"""
