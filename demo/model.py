"""The small GPT of the demo, its loss, and a pipe around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demo.gpt import gpt
from demo.sizes import Sizes
from pipekernels import Pipe

BLOCKS, HEADS = 4, 4
STAGES = 2
CHUNKS = 8
SCHEDULE: Final = "1f1b"


def new_model(sizes: Sizes) -> nn.Sequential:
    """The untrained model, with the same weights in every call."""
    torch.manual_seed(0)
    return gpt(sizes.width, BLOCKS, HEADS, sizes.context)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over all bytes of ``[batch, time, 256]`` logits."""
    return cross_entropy(logits.flatten(0, 1), target.flatten().to(logits.device))


def new_pipe(
    model: nn.Sequential, devices: Sequence[str], pipe_class: Callable[..., Any] = Pipe
) -> Any:
    """``model`` in two stages of as many layers, without recomputation."""
    balance = [len(model) // 2, len(model) - len(model) // 2]
    return pipe_class(model, balance, devices=devices, chunks=CHUNKS, checkpoint="never")
