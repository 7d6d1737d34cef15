"""FLOP counts of the products, for ``torch.utils.flop_counter``, which counts unknown operations
as 0.

``flop_counter`` imports Triton, which takes long: so sharded layers import this module when they
are made, and the package does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


@register_flop_formula([torch.ops.pipekernels.row_linear, torch.ops.pipekernels.sharded_gemm])
def linear_flops(x: torch.Size, weight: torch.Size, *rest: Any, out_shape: Any = None) -> int:
    """FLOPs of ``x @ weight.T``, from the shapes of the arguments."""
    return 2 * math.prod(x) * weight[0]
