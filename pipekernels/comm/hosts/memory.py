"""Tensors in memory of others, their bits, and numbers that a device and its host both see."""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels._torch_private import storage_at

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Kept while a kernel may still write to them, also if nobody else looks any more.
_in_use: set[Tensor] = set()


def tensor_at(address: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The ``count`` elements at ``address``, ``[count]``; the caller keeps them."""
    size = count * dtype.itemsize
    storage = storage_at(address, device, size)
    return torch.empty(0, dtype=dtype, device=device).set_(storage)


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of ``tensor``, contiguous; of which -1 has all set."""
    return tensor.view(_INTEGERS[min(tensor.itemsize, 8)])


class MappedWord:
    """An int64 in host memory that is mapped into the device's, 0 at first.

    The host reads it without a call to CUDA, and a kernel sees what the host has written when it
    runs, not when it was launched.

    Attributes:
        on_device: ``[1]``, as the device sees it.
    """

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"  # At the same address for every device.
        with torch.inference_mode(False):  # Or nobody outside of it could change them.
            self._on_host = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)
            self.on_device = tensor_at(self._on_host.data_ptr(), 1, torch.int64, device)
        _in_use.add(self._on_host)

    def read(self) -> int:
        return int(self._on_host.item())

    def write(self, value: int) -> None:
        self._on_host.fill_(value)

    def release(self) -> None:
        """Give the memory back with this object; to be called when the device is done with it."""
        _in_use.discard(self._on_host)
