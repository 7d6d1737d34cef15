"""Two GPUs that are pretended, to count what Python does for them.

CPU tensors say that they are on a GPU: the one they were made on or moved to, or else, as results
of operations, the one that was current when their device was first asked for. Streams, events and
the extension's copies do nothing, so values are wrong; ``recorded_streams`` has right ones.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipekernels import _backend

# Numbers that no machine has, as the package keeps the streams of copies per pair of devices.
GPUS = [torch.device("cuda", 100), torch.device("cuda", 101)]
EVENT = SimpleNamespace(wait=lambda *_: True, synchronize=lambda: None, is_done=lambda: True)
CHANNEL = SimpleNamespace(
    has_peer_access=False,
    has_broken_link=False,
    leaving=1,
    arriving=2,
    send=lambda *_: False,
    mark=lambda *_: True,
)


def stream_of(handle: int, device: torch.device) -> Any:
    nothing = lambda *_: None
    return SimpleNamespace(device=device, record_event=nothing, wait_event=nothing)


@contextmanager
def pretended_gpus() -> Iterator[None]:
    """A context in which all tensors say that they are on one of :data:`GPUS`."""
    current = GPUS[0]
    streams = {device: stream_of(0, device) for device in GPUS}
    places: dict[int, tuple[StorageWeakRef, torch.device]] = {}

    def place(tensor: torch.Tensor, device: torch.device | None = None) -> torch.device:
        storage = tensor.untyped_storage()
        if storage._cdata not in places:
            # The weak reference keeps the key from being used again.
            places[storage._cdata] = StorageWeakRef(storage), device or current
        return places[storage._cdata][1]

    def maker(make: Any) -> Any:
        def made(*args: Any, device: torch.device, **options: Any) -> torch.Tensor:
            tensor = make(*args, **options)
            place(tensor, device)
            return tensor

        return made

    def to(parameter: torch.Tensor, device: torch.device, *_: Any) -> torch.Tensor:
        moved = parameter.detach().clone()
        place(moved, device)
        return moved

    def set_device(device: Any) -> None:
        nonlocal current
        current = torch.device("cuda", getattr(device, "index", device))

    def set_stream(stream: Any) -> None:
        set_device(stream.device)
        streams[current] = stream

    cuda: dict[str, Any] = {
        "current_device": lambda: current.index,
        "current_stream": lambda device=None: streams[device or current],
        "default_generators": defaultdict(torch.Generator),
        "default_stream": lambda device: streams[device],
        "ExternalStream": stream_of,
        "init": lambda: None,
        "set_device": set_device,
        "set_stream": set_stream,
        "stream": lambda stream: nullcontext(set_stream(stream)),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in cuda.items():
            patch.setattr(torch.cuda, name, stand_in)
        for make in (torch.empty, torch.empty_like):
            patch.setattr(torch, make.__name__, maker(make))
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "device", property(place))
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        patch.setattr(_backend, "require_cuda", lambda device: None)
        patch.setattr(_backend.load(), "P2PChannel", lambda *_: CHANNEL, raising=False)
        patch.setattr(_backend.load(), "P2PEvent", lambda: EVENT, raising=False)
        for name, module in list(sys.modules.items()):
            if name.startswith("pipekernels.") and hasattr(module, "current_raw_stream"):
                # Copies of CPU tensors take it for their number of threads.
                patch.setattr(module, "current_raw_stream", lambda index: 1)
        yield
