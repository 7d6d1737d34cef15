"""Train with pipeline and tensor parallelism: two stages in each process, layers shared by ranks.

    torchrun --nproc-per-node 2 examples/train_pipeline_tensor.py

Every rank holds its part of all layers, and runs them as a pipe of two stages, each on a device of
its own (two GPUs per rank where there are enough, else the CPU). Prints the losses, and those of
one process.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn

from pipekernels import Communicator, Pipe, tensor_parallelize
from pipekernels.tensor_parallel import clip_grad_norm_


class Block(nn.Module):
    """An MLP with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(
    model: nn.Module, parallel: nn.Module, steps: int, first: torch.device, last: torch.device
) -> list[float]:
    """Losses of ``parallel``, whose parameters are those of ``model``."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        loss = nn.functional.mse_loss(parallel(x.to(first)), x.sin().to(last))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train with all ranks, then with rank 0 alone, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4, help="at least 2")
    parser.add_argument("--chunks", type=int, default=4, help="microbatches")
    args = parser.parse_args()

    rank, local, ranks = (int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    enough = torch.cuda.device_count() >= 2 * ranks
    cpu = torch.device("cpu")
    stages = [torch.device("cuda", 2 * local + i) if enough else cpu for i in range(2)]
    dist.init_process_group("cpu:gloo,cuda:nccl" if enough else "gloo")
    torch.manual_seed(0)  # The same weights on all ranks.
    whole = nn.Sequential(*[Block(64) for _ in range(args.layers)])

    with Communicator.from_process_group() as comm:
        model = tensor_parallelize(copy.deepcopy(whole), {"*.up": "column", "*.down": "row"}, comm)
        half = args.layers // 2
        pipe = Pipe(model, [half, args.layers - half], devices=stages, chunks=args.chunks)
        losses = train(model, pipe, args.steps, *stages)
    expected = train(whole, whole, args.steps, cpu, cpu)
    if rank == 0:
        print(f"{ranks} ranks, two stages:", *[f"{loss:.6f}" for loss in losses])
        print("one process:", *[f"{loss:.6f}" for loss in expected])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
