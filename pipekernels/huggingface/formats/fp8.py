"""Blocks of float8 (``quant_method: fp8``), as DeepSeek and Qwen publish them.

``weight`` ``[n, k]`` is float8, and ``weight_scale_inv`` has a factor for each block of it, of
``weight_block_size``, such as 128 x 128. They are multiplied while they are read.
"""

import torch
from torch import Tensor

from pipekernels.huggingface.formats import base
from pipekernels.huggingface.sources import Computed


def fp8(name: str, tensors: base.Tensors, config: base.Config) -> Computed:
    """The weight of a linear layer."""
    weight, scale = tensors["weight"], tensors["weight_scale_inv"]
    sizes = config.get("weight_block_size") or [1, 1]
    blocks = tuple(-(-length // size) for length, size in zip(weight.shape, sizes, strict=True))
    if scale.shape != blocks or not weight.dtype.startswith("F8_E"):
        found = f"has the shape {scale.shape}, for {weight.dtype} of the shape {weight.shape}"
        raise base.refusal(f"{name}.weight_scale_inv", f"{found} in blocks of {sizes}")

    def read(rows: slice, columns: slice) -> Tensor:
        i = torch.arange(rows.start, rows.stop) // sizes[0]  # The block of each row.
        j = torch.arange(columns.start, columns.stop) // sizes[1]
        own = scale[int(i[0]) : int(i[-1]) + 1, int(j[0]) : int(j[-1]) + 1].float()
        return weight[rows, columns].float().mul_(own[i - i[0]][:, j - j[0]])

    return Computed(weight.shape, read, "F32")
