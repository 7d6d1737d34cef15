"""FSDP2 (``fully_shard``) on the backend "pipekernels"; on four ranks HSDP, 2 x 2.

    torchrun --nproc-per-node 2 examples/fsdp.py

Each rank trains on its part of every batch. Prints the losses, and those of one process on the
whole batches.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# Where pipekernels is installed, torch knows the backend already.
if not dist.is_backend_available("pipekernels"):
    import pipekernels.distributed  # noqa: F401


def build() -> nn.Sequential:
    """The model, with the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def train(model: nn.Module, steps: int, rank: int, ranks: int) -> list[float]:
    """The loss of each step on this rank's part of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator).chunk(ranks)[rank]
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    dist.init_process_group("pipekernels")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    model = build()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    losses = torch.tensor(train(model, steps, rank, ranks))
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    alone = torch.tensor(train(build(), steps, 0, 1))
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-6)
    if rank == 0:
        print(f"{' x '.join(map(str, mesh.shape))} ranks: {losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"one process: {alone[0]:.4f} to {alone[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
