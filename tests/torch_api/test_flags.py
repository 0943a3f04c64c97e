"""Settings of torch.backends: each is in the environment layer, so that a rank with a different one is named."""

from __future__ import annotations

import json
from pathlib import Path

from tests.forked import run_python

FACTS = {
    "cudnn.enabled": {"cudnn.enabled"},
    "cudnn.benchmark": {"cudnn.benchmark"},
    "cudnn.deterministic": {"cudnn.deterministic"},
    "cudnn.allow_tf32": {"fp32_precision"},
    "mkldnn.enabled": {"mkldnn.enabled"},
    "mkldnn.deterministic": {"mkldnn.deterministic"},
    "fp16 reduction": {"cuda.matmul.allow_fp16_reduced_precision_reduction"},
    "bf16 reduction": {"cuda.matmul.allow_bf16_reduced_precision_reduction"},
    "fp16 accumulation": {"cuda.matmul.allow_fp16_accumulation"},
    "matmul.allow_tf32": {"fp32_precision", "float32_matmul_precision"},
    "flash attention": {"sdpa_enabled"},
    "efficient attention": {"sdpa_enabled"},
    "attention by maths": {"sdpa_enabled"},
    "attention of cudnn": {"sdpa_enabled"},
    "reduced attention": {"sdpa_reduced_math"},
    "mha fast path": {"mha_fastpath"},
    "mkldnn precision": {"fp32_precision"},
    "mkldnn rnn precision": {"fp32_precision"},
    "all precisions": {"fp32_precision"},
}
"""A setting, as tests/torch_api/switching.py switches it -> the facts that change."""


def test_each_setting_changes_its_fact_and_no_other() -> None:
    ended = run_python([Path(__file__).with_name("switching.py")])
    assert ended.returncode == 0, ended.stderr[-1500:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert {name: set(facts) for name, facts in found.items()} == FACTS
