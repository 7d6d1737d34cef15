"""Notices a module that overwrites what it has returned for an earlier micro-batch.

A layer may write every result to the same buffer, and return that. When the next stage reads the
result of one micro-batch, it may by then be that of another, depending on timing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class SentMemory:
    """The memory that modules have returned in one forward. Writes that no version counter sees, as
    those of kernels in a CUDA graph, are not noticed."""

    def __init__(self) -> None:
        # By module and address. A weak reference identifies a storage also after its end, when
        # another may have its address.
        self._sent: dict[tuple[str, int], tuple[StorageWeakRef, int, int]] = {}

    def note(self, owner: str, m: int, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Remember what ``owner`` has made of ``inputs`` of micro-batch ``m``.

        Raises:
            RuntimeError: one of ``tensors`` is one of an earlier micro-batch, overwritten since.
        """
        if torch.compiler.is_compiling():  # Tensors have no memory.
            return
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                continue
            if tensor.is_inference() or tensor.numel() == 0:  # The former have no versions.
                continue
            address, version = tensor.data_ptr(), tensor._version
            storage = StorageWeakRef(tensor.untyped_storage())
            before, written, first = self._sent.get((owner, address), (storage, version, m))
            self._sent[owner, address] = storage, version, m
            if before != storage or written == version:
                continue
            # An input that is given whole to every micro-batch may be passed on.
            if any(g.layout is torch.strided and g.data_ptr() == address for g in inputs):
                continue
            raise RuntimeError(
                f"{owner} returned the same memory for micro-batches {first} and {m}, and "
                "overwrote the results of the first, which are read later; return a clone of "
                "memory that a layer keeps"
            )
