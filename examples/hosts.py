"""Train on several hosts: layers are shared by the ranks of a host, batches by the hosts.

    torchrun --nproc-per-node 4 examples/hosts.py --pretend 2

That is one host whose ranks pretend to be on two. On two hosts, run on each, with its number
as NODE and the name of host 0 as HEAD:

        torchrun --nnodes 2 --node-rank NODE --master-addr HEAD --nproc-per-node 2 examples/hosts.py

Prints the losses, and those of one process with the whole batch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipekernels import Communicator, tensor_parallelize


def build() -> nn.Sequential:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8)).double()


def train(
    model: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int, hosts: Communicator | None
) -> list[float]:
    """The losses of some steps; averaged over ``hosts``, if given, and so are gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)
        loss.backward()
        mean = loss.detach()
        if hosts is not None:
            for tensor in (mean, *(p.grad for p in model.parameters() if p.grad is not None)):
                hosts.all_reduce(tensor, "avg")
        optimizer.step()
        losses.append(mean.item())
    return losses


def main() -> None:
    """Train with all ranks, then with rank 0 alone, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--pretend", type=int, metavar="HOSTS", help="that the ranks are on as many"
    )
    args = parser.parse_args()

    local = int(os.environ["LOCAL_RANK"])
    host, hosts = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    if args.pretend:
        per_host = int(os.environ["LOCAL_WORLD_SIZE"]) // args.pretend
        host, local, hosts = local // per_host, local % per_host, args.pretend
        # Ranks with different values do not share memory, and talk by Gloo as hosts do.
        os.environ["PIPEKERNELS_HOST_ID"] = str(host)

    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    x, target = (
        torch.randn(8 * hosts, width, dtype=torch.float64, generator=generator) for width in (32, 8)
    )
    with Communicator.from_process_group() as everyone:
        inside = everyone.split(color=host)  # In shared memory.
        between = everyone.split(color=local)  # One rank of each host.
        assert inside is not None and between is not None
        total = everyone.all_reduce(torch.ones(1))
        if everyone.rank == 0:
            print(f"{total.item():.0f} ranks on {hosts} hosts, {inside.world_size} on each")
        plan = {"0": "column", "2": "row"}
        model = tensor_parallelize(build(), plan, inside)
        mine = slice(8 * host, 8 * (host + 1))
        found = train(model, x[mine], target[mine], args.steps, between)
        everyone.barrier()
    if dist.get_rank() == 0:
        print("all ranks:  ", *[f"{loss:.6f}" for loss in found])
        expected = train(build(), x, target, args.steps, None)
        print("one process:", *[f"{loss:.6f}" for loss in expected])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
