"""Lightning: ``DDPStrategy`` on the backend "pipekernels".

    torchrun --nproc-per-node 2 examples/lightning_ddp.py

Needs Lightning (pip install lightning). Prints the losses, and those of one process with the whole
batch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# Where pipekernels is installed, torch knows the backend already.
if not dist.is_backend_available("pipekernels"):
    import pipekernels.distributed  # noqa: F401

ROWS = 64


def build() -> nn.Sequential:
    """The model, with the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def data() -> TensorDataset:
    """Inputs and targets of the whole batch."""
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1))


class Module(LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses, self.backend = build(), [], ""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, target = batch
        loss = nn.functional.mse_loss(self.model(x), target)
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        self.losses.append(mean.item())
        self.backend = dist.get_backend()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_alone(steps: int) -> list[float]:
    """The losses of one process."""
    model, (x, target) = build(), data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    ranks = int(os.environ["WORLD_SIZE"])
    rows = data()
    sampler = DistributedSampler(rows, ranks, int(os.environ["RANK"]), shuffle=False)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, max_epochs=steps, logger=False,
        strategy=DDPStrategy(process_group_backend="pipekernels"),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(rows, batch_size=ROWS // ranks, sampler=sampler))
    alone = train_alone(steps)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(alone))
    if trainer.is_global_zero:
        print(f"{module.backend}, {ranks} ranks: {module.losses[0]:.6f} to {module.losses[-1]:.6f}")
        print(f"one process: {alone[0]:.6f} to {alone[-1]:.6f}")


if __name__ == "__main__":
    main()
