"""BatchNorm whose running statistics are updated once per mini-batch, not per microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from pipekernels._arguments import check_kind, integer, whole
from pipekernels._torch_private import BatchNormBase
from pipekernels.pipeline.context import is_recomputing

Model = TypeVar("Model", bound=nn.Module)


class DeferredBatchNorm(BatchNormBase):
    """Normalises each microbatch by its statistics; updates running ones once per mini-batch.

    Statistics of microbatches are merged one by one (Chan, Golub and LeVeque, 1983). ``Pipe`` and
    ``execute_pipeline`` call :meth:`commit` after every mini-batch's forward, however many
    microbatches it had; elsewhere the layer calls it itself after ``chunks`` inputs. The running
    statistics are updated by the mean and unbiased variance that ``nn.BatchNorm`` computes of the
    mini-batch.

    Inputs: ``[N, C, ...]``, floating point.

    Args:
        args, kwargs: as for ``nn.BatchNorm1d``.
        chunks: number of microbatches of a mini-batch.
    """

    def __init__(self, *args: Any, chunks: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chunks = integer("chunks", whole(chunks))
        self.in_pipe = False  # True while a pipe runs the layer.
        self.discard()

    def discard(self) -> None:
        """Drop the statistics collected since the last commit, as after a failed mini-batch."""
        self._count = self._micro_batches = 0
        self._mean = self._squares = torch.zeros((), device="cpu")

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"DeferredBatchNorm got {input.dim()} dimensions; it needs at least 2: [N, C, ...]"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[N, C, ...]`` to the same shape."""
        if not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        if not is_recomputing():
            self._merge(input.detach())
            self._micro_batches += 1
            if self._micro_batches >= self.chunks and not self.in_pipe:
                self.commit()
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _merge(self, input: torch.Tensor) -> None:
        count = input.numel() // input.size(1)
        if count == 0:
            return
        assert self.running_mean is not None
        dims = [0, *range(2, input.dim())]
        values = input.to(self.running_mean.dtype)
        mean = values.mean(dims)  # [C]
        squares = (values - mean.view(-1, *[1] * (input.dim() - 2))).square().sum(dims)  # [C]
        # Merged with those before: both sums of squares, and what the means' distance adds.
        total = self._count + count
        delta = mean - self._mean
        self._squares = self._squares + squares + delta.square() * (self._count * count / total)
        self._mean = self._mean + delta * (count / total)
        self._count = total

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics, with all inputs since the last call as one mini-batch."""
        if self._count:
            assert self.running_mean is not None and self.running_var is not None
            assert self.num_batches_tracked is not None
            tracked = self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(self._mean, momentum)
            self.running_var.lerp_(self._squares / max(self._count - 1, 1), momentum)  # Unbiased.
        self.discard()

    @classmethod
    def convert_deferred_batch_norm(cls, module: Model, chunks: int = 1) -> Model:
        """:func:`convert_deferred_batch_norm`, under the name of fairscale and torchgpipe."""
        return convert_deferred_batch_norm(module, chunks)


@contextmanager
def committed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Commit every DeferredBatchNorm in ``modules`` after the body, the forward of one mini-batch.
    If the body raises, discard instead."""
    norms = {x for m in modules for x in m.modules() if isinstance(x, DeferredBatchNorm)}
    try:
        for norm in norms:
            norm.in_pipe = True
        yield
        for norm in norms:
            norm.commit()
    finally:
        for norm in norms:
            norm.in_pipe = False
            norm.discard()


def convert_deferred_batch_norm(module: Model, chunks: int = 1) -> Model:
    """Make every ``nn.BatchNorm1d/2d/3d`` in ``module`` that tracks statistics, but none of a
    subclass, a :class:`DeferredBatchNorm`, or give it the new number of chunks.

    Parameters, statistics, hooks and state_dict keys stay the same.

    Args:
        module: the model; returned.
        chunks: number of microbatches after which a layer that is run outside a pipe updates its
            running statistics.

    Raises:
        ValueError: ``chunks`` is below 1.
    """
    chunks = integer("chunks", whole(chunks))
    check_kind("module", module, nn.Module, "an nn.Module")
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, DeferredBatchNorm)
    norms: list[Any] = [norm for norm in module.modules() if type(norm) in plain]
    for norm in norms:
        if norm.track_running_stats and getattr(norm, "chunks", 0) != chunks:
            norm.__class__ = DeferredBatchNorm  # Keeps hooks, and references to the module.
            norm.chunks, norm.in_pipe = chunks, False
            norm.discard()
    return module
