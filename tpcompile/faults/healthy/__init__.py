"""Healthy tensor-parallel programs with parameters to draw, which the sentinel must let run; broken.py: controls.

blocks.py          our transformer blocks
compiled.py        ways to use torch.compile
life.py            what else happens in a job: slow ranks, evaluation, checkpoints, data loaders, reset
uneven.py          what may differ between ranks
dtensors.py        DTensor plans, FSDP2
hugging_face.py    transformers under its own tensor-parallel plan
broken.py          the negative controls
"""
