"""DTensor: ``parallelize_module`` of torch on the backend "pipekernels".

    torchrun --nproc-per-node 2 examples/dtensor.py

The first layer of an MLP is sharded by its columns, the second by its rows. Prints the loss, and
that of one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

# Where pipekernels is installed, torch knows the backend already.
if not dist.is_backend_available("pipekernels"):
    import pipekernels.distributed  # noqa: F401


def build() -> nn.Sequential:
    """The model, with the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def loss_of(model: nn.Module) -> torch.Tensor:
    """The loss on a batch that all ranks have."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    return nn.functional.mse_loss(model(x), x.flip(1))


def main() -> None:
    dist.init_process_group("pipekernels")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(build(), mesh, plan)
    loss, alone = loss_of(model), build()
    loss.backward()
    expected = loss_of(alone)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model[2].weight.grad.full_tensor(), alone[2].weight.grad)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: {loss:.4f}, one process: {expected:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
