"""Data parallelism: torch's DistributedDataParallel on the backend "pipekernels".

    torchrun --nproc-per-node 2 examples/ddp.py

Any number of ranks will do. Each trains a small GPT on its part of every batch, and DDP averages
the gradients over shared memory. Prints the losses, and those of one process on the whole batches.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# Where pipekernels is installed, torch knows the backend already, and this is not needed. A folder
# of sources is not installed, so there the import registers it.
if not dist.is_backend_available("pipekernels"):
    import pipekernels.distributed  # noqa: F401

VOCABULARY, CONTEXT, WIDTH, HEADS = 64, 32, 64, 4


class GPT(nn.Module):
    """A decoder of torch's own layers."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)  # [batch, time, vocabulary]


def train(model: nn.Module, steps: int, batch: int, rank: int, ranks: int) -> list[float]:
    """The losses of each step on this rank's ``batch`` sequences."""
    generator = torch.Generator().manual_seed(1)  # All ranks draw the whole batch.
    times = torch.arange(CONTEXT + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        first, distance = torch.randint(1, VOCABULARY, (2, batch * ranks, 1), generator=generator)
        text = (first + distance * times) % VOCABULARY
        part = text.chunk(ranks)[rank]
        loss = cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train with all ranks, then with each alone, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank")
    parser.add_argument("--blocks", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("pipekernels")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(args.blocks)
    alone = copy.deepcopy(model)

    losses = torch.tensor(
        train(DistributedDataParallel(model), args.steps, args.batch, rank, ranks)
    )
    dist.all_reduce(losses, dist.ReduceOp.AVG)  # The loss of the whole batch.
    expected = torch.tensor(train(alone, args.steps, args.batch * ranks, 0, 1))
    if rank == 0:
        print(f"{ranks} ranks:", *[f"{loss:.6f}" for loss in losses.tolist()])
        print("one process:", *[f"{loss:.6f}" for loss in expected.tolist()])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
