"""Two GPUs that are pretended, to count what Python does for them.

CPU tensors say that they are on a GPU: the one they were made on or moved to, or else, as results
of operations, the one that was current when their device was first asked for. Streams and events do
nothing, and the extension copies at once. So nothing here finds a race; ``recorded_streams`` does.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipekernels import _backend

# Numbers that no machine has, as the package keeps the streams of copies per pair of devices.
GPUS = [torch.device("cuda", 100), torch.device("cuda", 101)]


class Stream:
    """Also the events recorded on it."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.device = device
        self.record_event = lambda: self
        self.wait_event = lambda event: None


def ticket() -> Any:
    """A ``P2PTicket`` of copies that are done."""
    return SimpleNamespace(wait=lambda *_: True, synchronize=lambda: None, is_done=lambda: True)


def p2p_edge(*_: Any) -> Any:
    def send(ticket: Any, sources: Any, targets: Any, *_: Any) -> bool:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
        return False

    return SimpleNamespace(
        has_peer_access=False, leaving=1, arriving=2, send=send, mark=lambda *_: True
    )


class Gpus:
    """What torch knows of :data:`GPUS`: the current one, and which storage is on which."""

    def __init__(self) -> None:
        self.current = GPUS[0]
        self._streams = {device: Stream(0, device) for device in GPUS}
        # A weak reference keeps the key from being used again.
        self._places: dict[int, tuple[StorageWeakRef, torch.device]] = {}

    def place(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.device:
        """The device of ``tensor``, which is ``device`` if it has none yet."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._places:
            self._places[storage._cdata] = StorageWeakRef(storage), device or self.current
        return self._places[storage._cdata][1]

    def maker(self, make: Any) -> Any:
        def made(*args: Any, device: torch.device, **options: Any) -> torch.Tensor:
            tensor = make(*args, **options)
            self.place(tensor, device)
            return tensor

        return made

    def to(self, tensor: torch.Tensor, device: torch.device, *_: Any) -> torch.Tensor:
        """Of a module's parameters."""
        moved = tensor.detach().clone()
        self.place(moved, device)
        return moved

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._streams[device or self.current]

    def set_device(self, device: Any) -> None:
        self.current = torch.device("cuda", getattr(device, "index", device))

    def set_stream(self, stream: Stream) -> None:
        self.current, self._streams[stream.device] = stream.device, stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, current = self._streams[stream.device], self.current
        self.set_stream(stream)
        yield
        self._streams[stream.device], self.current = before, current


@contextmanager
def pretended_gpus() -> Iterator[None]:
    """A context in which all tensors say that they are on one of :data:`GPUS`."""
    gpus = Gpus()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("current_stream", "set_device", "set_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(gpus, name))
        patch.setattr(torch.cuda, "default_stream", gpus.current_stream)
        patch.setattr(torch.cuda, "current_device", lambda: gpus.current.index)
        patch.setattr(torch.cuda, "ExternalStream", Stream)
        patch.setattr(torch.cuda, "init", lambda: None)
        patch.setattr(torch.cuda, "default_generators", defaultdict(torch.Generator))
        for make in (torch.empty, torch.empty_like):
            patch.setattr(torch, make.__name__, gpus.maker(make))
        patch.setattr(torch.Tensor, "to", lambda *args: gpus.to(*args))
        patch.setattr(torch.Tensor, "device", property(gpus.place))
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        patch.setattr(_backend, "require_cuda", lambda device: None)
        patch.setattr(_backend.load(), "P2PEdge", p2p_edge, raising=False)
        patch.setattr(_backend.load(), "P2PTicket", ticket, raising=False)
        for name, module in list(sys.modules.items()):
            if name.startswith("pipekernels.") and hasattr(module, "current_raw_stream"):
                patch.setattr(module, "current_raw_stream", lambda index: 0)
        yield
