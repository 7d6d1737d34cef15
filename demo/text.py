"""Text from the GPT of act 1, in one process or split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn

from demo.gpt import Embedding
from demo.model import new_model
from demo.sizes import Sizes
from pipekernels import Communicator, tensor_parallelize

PROMPT = b"import os\n\n\ndef open_file(path):\n    "
TEMPERATURE = 0.7  # Below 1: prefers likely bytes.
PLAN = {
    "*.attention.qkv": "column",
    "*.attention.out": "row",
    "*.up": "column",
    "*.down": "row",
}


@torch.no_grad()
def generate(model: nn.Sequential, length: int) -> bytes:
    """``length`` bytes that follow the prompt, drawn with the same random numbers in every call.

    In float64, so that the rounding of a sum over ranks does not change the choice of a byte.
    """
    embedding = cast("Embedding", model[0])
    context = embedding.position.num_embeddings
    generator = torch.Generator().manual_seed(0)
    text = list(PROMPT)
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]]))[0, -1]  # [256]
        probabilities = (logits / TEMPERATURE).softmax(0)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text[len(PROMPT) :])


def load(sizes: Sizes, weights: Path) -> nn.Sequential:
    """The trained model in float64."""
    model = new_model(sizes)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.double().eval()


def prepare_split(rank: int, sizes: Sizes, weights: Path) -> Callable[[], bytes]:
    """A turn generates on all ranks together."""
    comm = Communicator.from_process_group()
    model = tensor_parallelize(load(sizes, weights), PLAN, comm)
    return lambda: generate(model, sizes.text_bytes)
