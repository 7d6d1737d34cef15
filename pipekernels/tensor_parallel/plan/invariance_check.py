"""Finds out whether a model has the same bits on any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind
from pipekernels.comm import Communicator, PeerError
from pipekernels.tensor_parallel.linear import ColumnParallelLinear
from pipekernels.tensor_parallel.plan.parallelize import tensor_parallelize
from pipekernels.tensor_parallel.sharded import sharded_parameters


class Difference(NamedTuple):
    """The first place where a model has other bits than on one rank.

    Attributes:
        world_size: the number of ranks.
        what: ``'output'`` of a module or ``'gradient'`` of a parameter.
        name: of the module or parameter.
        elements: how many elements differ.
        largest: the largest difference.
    """

    world_size: int
    what: str
    name: str
    elements: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.name!r} on {self.world_size} ranks: {self.elements} elements "
            f"differ from those on one rank, by up to {self.largest:.3g}"
        )


class _Part(NamedTuple):
    """A tensor of one rank. Of a part of the full one: where it lies, as starts and sizes along the
    last dimension, or None if that is not known."""

    tensor: Tensor
    spans: Sequence[tuple[int, int]] | None = None


Parts = dict[tuple[str, str], _Part]
"""What one rank has computed: by ``'output'`` or ``'gradient'`` and name, in that order."""


def check_invariance(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    plan: Mapping[str, str] | Literal["auto"] = "auto",
    world_sizes: Sequence[int] = (2, 4),
    loss: Callable[[Any], Tensor] | None = None,
) -> Difference | None:
    """Run ``model`` with ``invariant=True`` on one rank and on several, and compare the bits.

    The ranks are threads of this process, each with a copy of the model. Random functions, such as
    dropout, would differ: use ``model.eval()``, or set them to zero.

    Args:
        model: the full model, on the CPU; it stays as it is.
        inputs: keyword arguments of its forward.
        plan: as for :func:`tensor_parallelize`.
        world_sizes: numbers of ranks to compare with one rank.
        loss: of the output, to compare gradients as well; such as ``lambda output: output.loss``.

    Returns:
        The first difference, in the order in which modules were called, then of gradients; None if
        all bits are the same. Outputs between sharded layers are compared with the part that a
        rank should have.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    [expected] = _run(model, inputs, plan, 1, loss)
    for world_size in world_sizes:
        for rank, parts in enumerate(_run(model, inputs, plan, world_size, loss)):
            for (what, name), part in parts.items():
                own = _part_of(expected[what, name].tensor, part, rank)
                if own is not None and not same_bits(own, part.tensor):
                    differs = int((own != part.tensor).sum().item())
                    largest = (own.double() - part.tensor.double()).abs().max().item()
                    return Difference(world_size, what, name, differs, largest)
    return None


def _part_of(full: Tensor, part: _Part, rank: int) -> Tensor | None:
    """What ``part`` should be; None if it is not known which part it is."""
    sizes = part.tensor.shape
    if full.shape == sizes:
        return full
    if part.spans is not None:
        return torch.cat([full.narrow(-1, *span) for span in part.spans], -1)
    shorter = [dim for dim, size in enumerate(sizes) if size < full.shape[dim]]
    if len(shorter) != 1:
        return None
    size = sizes[shorter[0]]
    return full.narrow(shorter[0], rank * size, size)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype are equal bit by bit, NaNs and signs of zeros included."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _run(
    model: nn.Module,
    inputs: Mapping[str, Any],
    plan: Mapping[str, str] | Literal["auto"],
    world_size: int,
    loss: Callable[[Any], Tensor] | None,
) -> list[Parts]:
    copies = [copy.deepcopy(model) for _ in range(world_size)]
    threads = torch.get_num_threads()

    def body(comm: Communicator) -> Parts:
        torch.set_num_threads(threads)
        with comm:
            sharded = tensor_parallelize(copies[comm.rank], plan, comm, invariant=True)
            parts: Parts = {}
            for name, module in sharded.named_modules():
                module.register_forward_hook(_recorder(parts, name or "the model"))
            with torch.set_grad_enabled(loss is not None):
                result = sharded(**inputs)
                if loss is not None:
                    loss(result).backward()
            shards = sharded_parameters(sharded)
            for name, parameter in sharded.named_parameters():
                grad = parameter.grad
                if grad is not None and parameter in shards:
                    layer, own = shards[parameter]
                    grad = layer.gather(own, grad)
                if grad is not None:
                    parts["gradient", name] = _Part(grad)
            return parts

    with ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(body, comm) for comm in Communicator.threads(world_size)]
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    if errors:  # One rank's is the cause, the others' that it has failed.
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return [rank.result() for rank in ranks]


def _recorder(parts: Parts, name: str) -> Callable[..., None]:
    def record(module: nn.Module, args: object, output: Any) -> None:
        values = output.values() if isinstance(output, Mapping) else output
        tensors = [output] if isinstance(output, Tensor) else list(values)
        first = next((t for t in tensors if isinstance(t, Tensor)), None)
        if first is not None:
            spans = module.spans("weight") if isinstance(module, ColumnParallelLinear) else None
            parts.setdefault(("output", name), _Part(first.detach().clone(), spans))

    return record
