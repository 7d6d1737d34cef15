"""How many floating-point operations products take, for ``torch.utils.flop_counter``.

What it does not know it counts as none. Importing it takes long, as it imports Triton, so only
layers import this module, not the package.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


@register_flop_formula([torch.ops.pipekernels.row_linear, torch.ops.pipekernels.sharded_gemm])
def linear_flops(x: torch.Size, weight: torch.Size, *rest: Any, out_shape: Any = None) -> int:
    """Of ``x @ weight.T``, by the shapes of the arguments."""
    return 2 * math.prod(x) * weight[0]
