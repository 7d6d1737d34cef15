"""A rank's backend for tensors on its CUDA device."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels import _backend
from pipekernels._arguments import integer
from pipekernels._torch_private import current_backward, current_raw_stream, disable_dynamo
from pipekernels.comm.messages import backends_of
from pipekernels.comm.process_group import ProcessGroupBackend
from pipekernels.comm.shared_memory import NativeBackend, SharedMemoryBackend
from pipekernels.comm.tensors import allocated
from pipekernels.device.streams import with_index

_log = logging.getLogger(__name__)

_VARIABLE = "PIPEKERNELS_SYMMETRIC_BYTES"
_DEFAULT = 1 << 30
MOST_BLOCKS = 64  # Thread blocks of a collective, as kMaxDeviceBlocks of the extension.
DEFAULT_BLOCKS = 54  # So that two communicators' blocks are resident together on an A100.


def symmetric_bytes() -> int:
    """The most bytes of device memory that a rank takes for symmetric tensors.

    Raises:
        ValueError: the environment variable ``PIPEKERNELS_SYMMETRIC_BYTES`` is not valid.
    """
    text = os.environ.get(_VARIABLE, str(_DEFAULT))
    if not text.isdecimal() or not 0 < int(text) < 1 << 48:
        raise ValueError(f"{_VARIABLE} must be a positive number of bytes, got {text!r}")
    return int(text)


def check_blocks(device_blocks: int) -> None:
    """Raise ValueError unless ``device_blocks`` is a number of thread blocks of a collective."""
    if integer("device_blocks", device_blocks) > MOST_BLOCKS:
        raise ValueError(f"device_blocks must be at most {MOST_BLOCKS}, got {device_blocks}")


class CudaBackend(NativeBackend):
    """A backend for a CUDA device, over the ranks that share memory with this one.

    Making one is a collective over ``local``.

    Args:
        local: the backend for CPU tensors; to be closed after this.
        device: a CUDA device.
        parent: the backend, if there is one, of the communicator that this one was split off. If it
            is of this class and open on all ranks, its symmetric memory is shared.
        blocks: the most thread blocks of a collective; the same on all ranks.

    Attributes:
        check: raises errors of earlier calls, as far as known.
        synchronize: waits for this rank's collectives, then checks.
        broken_links: ranks that do not get what each other's GPU writes: close the backend then.
        has_slow_links: whether there are more than two GPUs, not all of them joined by NVLink.

    Raises:
        RuntimeError: the ranks have different ``blocks``, or this build, torch, or a rank's device
            does not support it, or a graph is being captured.
    """

    def __init__(
        self,
        local: SharedMemoryBackend,
        device: torch.device,
        parent: object = None,
        *,
        blocks: int = DEFAULT_BLOCKS,
    ) -> None:
        _backend.require_cuda(device)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first CUDA collective of a communicator sets its device up, which a graph "
                "cannot hold; call one before the capture"
            )
        self.device = with_index(device)
        native_parent = parent._native if isinstance(parent, CudaBackend) else None
        native: _backend.CudaCommunicator = _backend.load().CudaCommunicator(
            local.core, self.device.index, symmetric_bytes(), blocks, native_parent
        )
        super().__init__(native)
        self.broken_links, self.has_slow_links = native.broken_links, native.has_slow_links
        self.check = native.check
        self.synchronize = native.synchronize
        # Without this, the destructor of a backend that was not closed would wait and hold the GIL,
        # which the threads of other ranks may need to finish what it waits for.
        closing = weakref.finalize(self, native.close, False)
        closing.atexit = False  # Do not wait for collectives when the process exits.

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        self.check()  # Raises clearer errors than torch, for example in a forked child.
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "symmetric memory cannot be allocated while a graph is captured, which would go on "
                "using it; allocate it before, and keep it"
            )
        tensor = self._allocate(sizes, dtype)
        if tensor is None:
            raise RuntimeError(
                f"no room for {sizes.numel() * dtype.itemsize} bytes of symmetric memory on "
                f"{self.device}; drop symmetric tensors that are no longer needed, free device "
                f"memory, or set {_VARIABLE} to more than {symmetric_bytes()}"
            )
        return tensor

    def output(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        tensor = self._allocate(sizes, dtype)
        if tensor is None:
            tensor = torch.empty(sizes, dtype=dtype, device=self.device)
        return tensor

    def close(self, *, abort: bool) -> None:
        """Wait for this rank's collectives, or abort them, and free the memory."""
        self._native.close(abort)

    @disable_dynamo  # Which would trace the stream as an object.
    def _caller(self) -> tuple[int, bool]:
        """The current stream, and whether this thread may wait for other ranks' streams."""
        assert current_raw_stream is not None  # As this build of torch has CUDA.
        return current_raw_stream(self.device.index), _may_meet()

    def _allocate(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if sizes.numel() == 0:
            return torch.empty(sizes, dtype=dtype, device=self.device)
        assert current_raw_stream is not None  # As this build of torch has CUDA.
        stream = current_raw_stream(self.device.index)
        return allocated(lambda s, code: self._native.allocate(s, code, stream), sizes, dtype)


def between_hosts(
    group: dist.ProcessGroup | None, hosts: int, device: torch.device, parent: object
) -> ProcessGroupBackend:
    """The backend of ranks on several hosts.

    Raises:
        RuntimeError: there is no ``group``, it has no backend for CUDA, or CUDA cannot be used.
    """
    _backend.require_cuda(device)
    if group is None or "cuda" not in backends_of(group):
        has = "no group" if group is None else f"a group with {backends_of(group)}"
        raise RuntimeError(
            f"CUDA tensors go from host to host by torch.distributed, but there is {has}; make "
            "the communicator by from_process_group() of a group that was initialised with "
            "backend='cpu:gloo,cuda:nccl'"
        )
    return ProcessGroupBackend(group, with_index(device), hosts)


def over_links(
    make: Callable[..., CudaBackend],
    group: dist.ProcessGroup | None,
    device: torch.device,
    parent: object,
) -> CudaBackend | ProcessGroupBackend:
    """``make(device, parent)``, or where GPUs have broken or slow links the NCCL of ``group``.

    RuntimeError if links are broken and there is no NCCL."""
    backend = make(device, parent)
    has_nccl = group is not None and backends_of(group).get("cuda") == "nccl"
    problem = "NVLink does not join all GPUs" if backend.has_slow_links and has_nccl else ""
    if backend.broken_links:
        problem = f"{backend.broken_links} do not get what each other's GPU writes to their memory"
    if not problem:
        return backend
    backend.close(abort=False)
    if group is not None and has_nccl:
        _log.warning("%s: collectives on CUDA run on NCCL", problem)
        return ProcessGroupBackend(group, backend.device, hosts=1)
    raise RuntimeError(
        f"{problem}; turn off the IOMMU or PCI access control (ACS), or make the communicator by "
        "from_process_group() of a group with backend='cpu:gloo,cuda:nccl'"
    )


def _may_meet() -> bool:
    """Whether this thread may wait for threads of other ranks: not if it is autograd's."""
    # Autograd has one thread per device, which runs the backwards of all ranks one after another.
    # With `set_multithreading_enabled(False)` a backward runs on the calling thread instead.
    return current_backward() == -1 or not torch.autograd.is_multithreading_enabled()
