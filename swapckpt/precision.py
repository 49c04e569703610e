"""Which parameters have an fp32 master, and the key it is kept and saved under."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MASTER = "master"
"""State key of the fp32 copy of a low-precision parameter that the optimizer steps in its place."""

MASTER_DTYPE = torch.float32


def is_low_precision(param: Tensor) -> bool:
    """True for a parameter in which small updates are lost to rounding: bf16 or fp16."""
    return param.dtype in (torch.bfloat16, torch.float16)
