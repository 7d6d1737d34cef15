"""The plain loop over microbatches that a pipe has the bits of, and how either is run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from pipekernels import NoChunk
from pipekernels.ops.micro_batch import micro_batch_sizes
from pipekernels.pipeline.schedule import SCHEDULES

# How a model is run: a forward and one backward, or two, or none; a step of each schedule.
WAYS = ("forward", "two backwards", "no_grad", "inference_mode", *SCHEDULES)


def leaves_of(value: Any, of: type) -> list[Any]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, of)]


def task_seed(base: int, stage: int, micro_batch: int) -> int:
    """Of a stage on a microbatch of the mini-batch that drew ``base``."""
    return base + stage * 0x9E3779B1 + micro_batch * 0x85EBCA77


def loss_of(output: Any) -> Tensor:
    """A mean over rows, of all outputs that require a gradient."""
    tensors = [t.float() if t.dtype == torch.bfloat16 else t for t in leaves_of(output, Tensor)]
    return sum(t.square().mean() if t.dim() else t for t in tensors if t.requires_grad)


class Loop:
    """Called as a pipe, runs ``stages``, lists of layers, on one microbatch after another.

    Each stage is seeded for each microbatch, as a pipe's are, whose first draw from the caller's
    generator is the base of all seeds.
    """

    def __init__(
        self,
        stages: Sequence[nn.Sequential],
        chunks: int,
        batch_dim: int = 0,
        *,
        copies: bool = False,
    ) -> None:
        self.stages, self.chunks, self.dim, self.copies = stages, chunks, batch_dim, copies

    def __call__(self, *args: Any) -> Any:
        self._begin(args)
        with torch.random.fork_rng(devices=[]):
            outputs = [self._forward(m, args) for m in range(len(self.sizes))]
        leaves, structures = zip(*map(_pytree.tree_flatten, outputs), strict=True)
        joined = [self._join(parts) for parts in zip(*leaves, strict=True)]
        return _pytree.tree_unflatten(joined, structures[0])

    def train_step(
        self, args: Any, target: None, loss_fn: Callable[..., Tensor], *, schedule: str, **_: Any
    ) -> Tensor:
        """There is a backward per microbatch; those of GPipe are from the last to the first."""
        args = args if isinstance(args, tuple) else (args,)
        self._begin(args)
        losses = []
        with torch.random.fork_rng(devices=[]):
            for m in range(len(self.sizes)):
                output = self._forward(m, args)
                torch.manual_seed(task_seed(self._base, len(self.stages), m))
                losses.append(loss_fn(output))
        pairs = list(zip(losses, self._weights, strict=True))
        with torch.autocast("cpu", enabled=False):
            for loss, weight in reversed(pairs) if schedule == "gpipe" else pairs:
                loss.backward(loss.new_full((), weight))
        return torch.stack([loss.detach() * weight for loss, weight in pairs]).sum()

    def _begin(self, args: Sequence[Any]) -> None:
        self._base = int(torch.empty((), dtype=torch.int64).random_())
        first = next(t for t in args if isinstance(t, Tensor))
        rows = first.shape[self.dim]
        self.sizes = micro_batch_sizes(rows, self.chunks)
        self._weights = [size / rows for size in self.sizes]

    def _forward(self, m: int, args: Sequence[Any]) -> Any:
        cast_off = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", cache_enabled=False, enabled=cast_off):
            given: Sequence[Any] = [self._part(m, arg) for arg in args]
            for index, stage in enumerate(self.stages):
                torch.manual_seed(task_seed(self._base, index, m))
                for layer in stage:
                    given = [layer(*given)]
        return given[0]

    def _part(self, m: int, value: Any) -> Any:
        if isinstance(value, NoChunk):
            return value.tensor
        if isinstance(value, Tensor):
            part = value.split(self.sizes, self.dim)[m]
            return part.clone() if self.copies else part
        return value

    def _join(self, parts: Sequence[Any]) -> Any:
        if not isinstance(parts[0], Tensor):
            return None if parts[0] is None else list(parts)
        if parts[0].dim() == 0:
            return sum(part * weight for part, weight in zip(parts, self._weights, strict=True))
        return torch.cat(list(parts), self.dim)


def cut(layers: Any, balance: Sequence[int]) -> list[nn.Sequential]:
    ends = accumulate(balance, initial=0)
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(ends)]


def lanes_for(way: str, stages: int) -> dict[str, Any]:
    return {"lanes": max(n for n in (3, 2, 1) if stages % n == 0)} if way == "interleaved" else {}


def results(
    run: Callable[..., Any],
    way: str,
    args: Sequence[Any],
    module: nn.Module,
    stages: int,
    loss_fn: Callable[[Any], Tensor] = loss_of,
) -> list[Any]:
    """Outputs or loss, gradients of inputs and parameters, buffers, then numbers and draws."""
    module.zero_grad()
    given = [
        arg.detach().clone().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg
        for arg in args
    ]
    before = [t.detach().clone() for t in given if isinstance(t, Tensor)]
    torch.manual_seed(7)
    if way in SCHEDULES:
        lanes = lanes_for(way, stages)
        value = tuple(given) if len(given) > 1 else given[0]
        output = run.train_step(value, None, loss_fn, schedule=way, **lanes)  # type: ignore[attr-defined]
    else:
        context = getattr(torch, way) if way in ("no_grad", "inference_mode") else nullcontext
        with context():
            output = run(*given)
        if context is nullcontext:
            with torch.autocast("cpu", enabled=False):
                loss = loss_fn(output)
                for again in (True, False)[way == "forward" :]:
                    loss.backward(retain_graph=again)
    leaves = [t for t in given if isinstance(t, Tensor)]
    if way not in ("no_grad", "inference_mode"):  # There a layer may write to the input.
        assert all(map(torch.equal, leaves, before))
    grads = [leaf.grad for leaf in [*leaves, *module.parameters()]]
    buffers = [buffer.clone() for buffer in module.buffers()]
    outputs = leaves_of(output, Tensor)
    flags = [(t.requires_grad, t.is_inference()) for t in outputs]
    outputs = [t.detach() for t in outputs]
    return [outputs, flags, grads, buffers, leaves_of(output, int), torch.rand(2)]
