"""A mini-batch cut into micro-batches, and outputs written back into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipekernels.ops.micro_batch import micro_batch_sizes


class Scatter:
    """Micro-batches of ``tensors`` as views along dimension 0.

    Args:
        tensors: each ``[batch, ...]``.
        chunks: the most micro-batches to make; there are ``max(1, min(chunks, batch))``, of sizes
            that differ by at most one, larger first.

    Raises:
        ValueError: a tensor has no dimension to split, or the tensors' batch sizes differ.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], chunks: int) -> None:
        for i, tensor in enumerate(tensors):
            if tensor.dim() == 0:
                raise ValueError(
                    f"input {i} has no dimension; a batch dimension 0 is needed to split it"
                )
            if tensor.size(0) != tensors[0].size(0):
                raise ValueError(
                    f"input {i} has batch size {tensor.size(0)} and input 0 has {tensors[0].size(0)}; "
                    "all inputs are split together and must agree in dimension 0"
                )
        self.batch = tensors[0].size(0)
        self.sizes = micro_batch_sizes(self.batch, chunks)
        self.offsets = [sum(self.sizes[:m]) for m in range(len(self.sizes))]
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, m: int) -> tuple[torch.Tensor, ...]:
        return tuple(t.narrow(0, self.offsets[m], self.sizes[m]) for t in self._tensors)


class Gather:
    """One tensor, filled micro-batch by micro-batch as they arrive in any order, so that nothing is
    concatenated.

    A micro-batch may bring any multiple of its rows (``[batch * tokens, ...]``); where no place can
    be told in advance, or a dtype or shape changes on the way, the parts are concatenated at the
    end.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._offsets = [sum(sizes[:m]) for m in range(len(sizes))]
        self._whole: torch.Tensor | None = None
        self._rows = 0
        self._parts: dict[int, torch.Tensor] = {}
        self.lengths = [0] * len(sizes)

    def write(self, m: int, part: torch.Tensor) -> None:
        """Take micro-batch ``m``'s part, ``[rows, ...]``; its memory is not needed afterwards.

        Raises:
            ValueError: the part has no dimension to join along.
        """
        if part.dim() == 0:
            raise ValueError(
                "the last stage returned a tensor without dimensions; outputs are joined along dimension 0 "
                "(compute a scalar loss outside the pipe)"
            )
        self.lengths[m] = part.size(0)
        if len(self._sizes) == 1:
            self._whole = part.detach()
            return
        if self._whole is None and not self._parts:
            self._rows = part.size(0) // self._sizes[m]
            total = self._rows * sum(self._sizes)
            self._whole = part.new_empty((total, *part.shape[1:]))
        if self._fits(m, part):
            assert self._whole is not None
            offset = self._rows * self._offsets[m]
            self._whole.narrow(0, offset, part.size(0)).copy_(part.detach())
        else:
            self._parts[m] = part.detach()

    def take(self) -> torch.Tensor:
        """All parts in order along dimension 0. Keeps no reference: the output's graph holds this
        object."""
        whole = self._whole
        if self._parts or whole is None:
            whole = torch.cat([self._part(m) for m in range(len(self._sizes))])
        self._whole = None
        self._parts.clear()
        return whole

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """``whole``, shaped like what :meth:`take` gave, as the views that belong to each
        micro-batch."""
        return list(whole.split(self.lengths))

    def _fits(self, m: int, part: torch.Tensor) -> bool:
        return (
            self._whole is not None
            and part.size(0) == self._rows * self._sizes[m]
            and part.shape[1:] == self._whole.shape[1:]
            and part.dtype == self._whole.dtype
        )

    def _part(self, m: int) -> torch.Tensor:
        if m in self._parts:
            return self._parts[m]
        assert self._whole is not None
        return self._whole.narrow(0, self._rows * self._offsets[m], self.lengths[m])
