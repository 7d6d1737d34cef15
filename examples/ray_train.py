"""Train with Ray Train, whose workers are the ranks of a group of the backend ``pipekernels``.

    python examples/ray_train.py --workers 2

Needs Ray (pip install 'ray[train]'). Prints the losses, and those of one process with the whole
batch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn
from torch.nn import functional


def register() -> None:
    """Runs in every worker before it makes its group."""
    import pipekernels.distributed  # noqa: F401


def train(model: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int) -> list[float]:
    """The losses of some steps, averaged over the group if there is one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def build() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, inputs and targets, the same on every worker."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    return model, torch.randn(16, 32), torch.randn(16, 8)


def worker(config: dict[str, int]) -> None:
    """What each worker runs, with its share of the batch."""
    model, x, target = build()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel = prepare_model(model)  # A DistributedDataParallel.
    losses = train(parallel, x.chunk(ranks)[rank], target.chunk(ranks)[rank], config["steps"])
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
        report({"losses": losses, "backend": dist.get_backend()}, checkpoint=checkpoint)


def main() -> None:
    """Train with all workers, then in this process, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="a divisor of 16")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    ray.init(runtime_env={"worker_process_setup_hook": register})
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            worker,
            train_loop_config={"steps": args.steps},
            torch_config=TorchConfig(backend="pipekernels"),
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(storage_path=folder),
        )
        metrics = trainer.fit().metrics
    ray.shutdown()
    found = metrics["losses"]
    print(f"{args.workers} workers, {metrics['backend']}:", *[f"{loss:.6f}" for loss in found])
    expected = train(*build(), args.steps)
    print("one process:", *[f"{loss:.6f}" for loss in expected])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


if __name__ == "__main__":
    main()
