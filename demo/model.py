"""The small GPT of the demo, and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demo.gpt import gpt
from demo.sizes import Sizes

BLOCKS, HEADS = 4, 4


def new_model(sizes: Sizes) -> nn.Sequential:
    """The untrained model, with the same weights in every call."""
    torch.manual_seed(0)
    return gpt(sizes.width, BLOCKS, HEADS, sizes.context)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all bytes of ``[batch, time, 256]`` logits."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())
