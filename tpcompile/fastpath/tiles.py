"""Sizes of a product of few rows -> whether its kernel takes them; without Triton, which a block can do without."""

from __future__ import annotations

import torch

MOST_ROWS = 8
"""Rows of the smallest tile of the tensor cores: the weight's rows are their wide side."""
COLS = 64
"""Outputs of a program: with DEPTH and STAGES, two kernels fit on a multiprocessor at once. Measured on an H200."""
DEPTH = 128
STAGES = 6
DTYPES = (torch.bfloat16, torch.float16)


def are_few_rows(num_rows: int, num_out: int, width: int, dtype: torch.dtype) -> bool:
    """True for [num_rows, width] times [num_out, width]: few rows, and whole tiles of the weight."""
    is_whole = num_out % COLS == 0 and width % DEPTH == 0 and width >= STAGES * DEPTH
    return num_rows <= MOST_ROWS and is_whole and dtype in DTYPES
