"""Whether the ranks have the same model before it is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

import torch
from torch import Tensor

from pipekernels.comm import Communicator


def check_equal_on_ranks(weights: Mapping[str, Tensor], comm: Communicator) -> None:
    """Raise ValueError unless the first elements of all ``weights``, which have names, are the same
    on all ranks. A collective."""
    elements = [
        nan if w.is_meta or w.numel() == 0 else w.detach()[(0,) * w.dim()].item().real
        for w in weights.values()
    ]
    gathered = comm.all_gather(torch.tensor([elements], dtype=torch.float64, device="cpu"))
    differences = (gathered - gathered[0]).nan_to_num(0).nonzero().tolist()  # [[rank, index], ...]
    if differences:
        rank, index = differences[0]
        raise ValueError(
            f"the weight of {list(weights)[index]!r} on rank {rank} is not that on rank 0; seed "
            "all ranks the same way before the model is made, or load the same checkpoint on all"
        )
