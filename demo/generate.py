"""Text from a trained model, in one process or split over several with tensor parallelism."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from demo.gpt import Block
from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear

TEMPERATURE = 0.7  # Below 1: prefers likely bytes.


@torch.no_grad()
def generate(model: nn.Sequential, prompt: bytes, length: int) -> bytes:
    """``length`` bytes that follow ``prompt``, drawn with the same random numbers in every call."""
    context = model[0].position.num_embeddings
    generator = torch.Generator().manual_seed(0)
    text = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]]))[0, -1]  # [256]
        probabilities = (logits / TEMPERATURE).softmax(0)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text[len(prompt) :])


def shard(model: nn.Sequential, comm: Communicator) -> nn.Sequential:
    """Split attention and MLP of every block over the ranks: two all-reduces a block."""
    for block in model:
        if isinstance(block, Block):
            attention = block.attention
            attention.qkv = ColumnParallelLinear.from_linear(attention.qkv, comm)
            attention.out = RowParallelLinear.from_linear(attention.out, comm)
            block.up = ColumnParallelLinear.from_linear(block.up, comm)
            block.down = RowParallelLinear.from_linear(block.down, comm)
    return model


def generate_split(
    build: Callable[[], nn.Sequential], weights: Path, prompt: bytes, length: int, world_size: int
) -> tuple[list[bytes], float]:
    """As :func:`generate`, with the model split over ``world_size`` processes of this host.

    Args:
        build: makes the unsplit model; picklable.
        weights: the unsplit model's state_dict.
        prompt: the text to continue.
        length: bytes to generate.
        world_size: number of processes.

    Returns:
        The text of each rank, and the seconds that rank 0 took.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        multiprocessing.spawn(
            _rank, (world_size, folder, build, weights, prompt, length), nprocs=world_size
        )
        texts = [(folder / f"text-{rank}").read_bytes() for rank in range(world_size)]
        return texts, float((folder / "seconds").read_text())


def _rank(
    rank: int,
    world_size: int,
    folder: Path,
    build: Callable[[], nn.Sequential],
    weights: Path,
    prompt: bytes,
    length: int,
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # A host name may not resolve.
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    with Communicator.from_process_group() as comm:
        # The sharded layers take the state_dict of the whole model.
        model = shard(build(), comm).double()
        model.load_state_dict(torch.load(weights, weights_only=True))
        comm.barrier()
        start = time.perf_counter()
        text = generate(model, prompt, length)
        (folder / f"text-{rank}").write_bytes(text)
        if rank == 0:
            (folder / "seconds").write_text(str(time.perf_counter() - start))
    dist.destroy_process_group()
