"""Tensors over existing memory, their bits, and integers shared by a device and its host."""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels._torch_private import storage_at

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Keeps the memory of MappedWords alive while a kernel may still write to it.
_in_use: set[Tensor] = set()


def tensor_at(address: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor ``[count]`` over the memory at ``address``, which the caller must keep alive."""
    size = count * dtype.itemsize
    storage = storage_at(address, device, size)
    return torch.empty(0, dtype=dtype, device=device).set_(storage)


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of the contiguous ``tensor`` as integers; -1 has all bits set."""
    return tensor.view(_INTEGERS[min(tensor.itemsize, 8)])


class MappedWord:
    """An int64, initially 0, in host memory that is mapped into the device's address space.

    The host reads it without a CUDA call. A kernel sees the host's value at the time it runs, not
    at its launch.

    Attributes:
        on_device: ``[1]``, the device's view.
    """

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"  # Has the same address on the host and all devices.
        with torch.inference_mode(False):  # Inference tensors could not be written outside it.
            self._on_host = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)
            self.on_device = tensor_at(self._on_host.data_ptr(), 1, torch.int64, device)
        _in_use.add(self._on_host)

    def read(self) -> int:
        return int(self._on_host.item())

    def write(self, value: int) -> None:
        self._on_host.fill_(value)

    def release(self) -> None:
        """Let the memory be freed with this object. Call it when the device no longer uses it."""
        _in_use.discard(self._on_host)
