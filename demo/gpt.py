"""A byte-level GPT of plain modules, as an ``nn.Sequential`` of an embedding, blocks and a head."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Embedding(nn.Module):
    """Bytes and their positions to vectors: ``[batch, time]`` to ``[batch, time, width]``."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.byte(x) + self.position.weight[: x.shape[1]]


class Attention(nn.Module):
    """Causal self-attention.

    The output features of ``qkv`` are grouped by head, so that a rank's contiguous shard of them
    consists of whole heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # [batch, time, head, 3, width]
        q, k, v = heads.transpose(1, 2).unbind(3)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then an MLP, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


def gpt(width: int, blocks: int, heads: int, context: int) -> nn.Sequential:
    """The model: ``[batch, time]`` bytes to ``[batch, time, 256]`` logits of the next byte."""
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
    return nn.Sequential(
        Embedding(width, context), *(Block(width, heads) for _ in range(blocks)), head
    )
