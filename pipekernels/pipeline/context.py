"""The caller's thread-local torch state, carried into lanes and into recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class CallerContext:
    """Inference mode, autocast and default device of the thread that makes it.

    Grad mode is not among them: the engine sets it for every task.
    """

    def __init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in ("cpu", "cuda")
            if torch.is_autocast_enabled(device_type)
        ]
        self.cache_autocast = torch.is_autocast_cache_enabled()
        device = torch.get_default_device()
        self.default_device = None if device.type == "cpu" else device

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the body, on any thread, as if on the thread that made this object."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            for device_type, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(device_type, dtype=dtype, cache_enabled=self.cache_autocast)
                )
            yield
