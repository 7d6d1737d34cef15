"""Train a network with skip connections that was written for fairscale's Pipe.

    python examples/from_fairscale.py

Only the import lines have changed. Prints the losses, and those of the plain network.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator

import torch
from torch import nn
from torch.nn import functional

# Before:
# from fairscale.nn import Pipe
# from fairscale.nn.pipe.balance import balance_by_size
# from fairscale.nn.pipe.skip import pop, skippable, stash
from pipekernels import Pipe
from pipekernels.balance import balance_by_size
from pipekernels.skip import pop, skippable, stash


@skippable(stash=["image"])
class Encoder(nn.Module):
    """Narrows its input, and stashes it for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, image: torch.Tensor) -> Generator[stash, None, torch.Tensor]:
        yield stash("image", image)
        return torch.relu(self.layer(image))


@skippable(pop=["image"])
class Decoder(nn.Module):
    """Widens its input again, and adds the input of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 64)

    def forward(self, code: torch.Tensor) -> Generator[pop, torch.Tensor, torch.Tensor]:
        image = yield pop("image")
        return image + self.layer(code)


def build() -> nn.Sequential:
    """The network; the same at every call."""
    torch.manual_seed(0)
    middle = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(Encoder(), *middle, Decoder(), nn.Linear(64, 10))


class Plain(nn.Module):
    """The same network without a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, *middle, self.decoder, self.head = build()
        self.middle = nn.Sequential(*middle)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        code = self.middle(torch.relu(self.encoder.layer(image)))
        return self.head(image + self.decoder.layer(code))


def train(model: nn.Module, device: torch.device, steps: int) -> list[float]:
    """The losses of some steps, on the same random images."""
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(32, 64, generator=generator), torch.arange(32) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train the pipe, then the plain network, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", i) for i in range(2)] if gpus > 1 else [torch.device("cpu")] * 2
    network = build()
    balance = balance_by_size(2, network, torch.randn(32, 64), device="cpu")
    pipe = Pipe(network, balance, devices=devices, chunks=4, checkpoint="except_last")
    print("layers of each stage:", pipe.balance)

    found = train(pipe, devices[-1], args.steps)
    print("pipe: ", *[f"{loss:.6f}" for loss in found])
    expected = train(Plain(), torch.device("cpu"), args.steps)
    print("plain:", *[f"{loss:.6f}" for loss in expected])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


if __name__ == "__main__":
    main()
