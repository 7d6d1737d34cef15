"""The caller's thread-local torch state, carried into lanes and into recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pipekernels.local_ops.dispatch import is_observed


class CallerContext:
    """Inference mode, autocast and default device of the thread that makes it.

    Grad mode is not among them: the engine sets it for every task.
    """

    def __init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = {
            device_type: torch.get_autocast_dtype(device_type)
            for device_type in ("cpu", "cuda")
            if torch.is_autocast_enabled(device_type)
        }
        self.cache_autocast = torch.is_autocast_cache_enabled()
        device = default_device()
        self.default_device = None if device.type == "cpu" else device

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the body, on any thread, as if on the thread that made this object."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            for device_type in ("cpu", "cuda"):
                dtype = self.autocast.get(device_type)
                if dtype is not None:
                    stack.enter_context(
                        torch.autocast(device_type, dtype=dtype, cache_enabled=self.cache_autocast)
                    )
                elif torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            # For layers that enter autocast themselves.
            stack.enter_context(cast_cache(self.cache_autocast))
            yield

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Run the body, on the thread that made this object, without its autocast."""
        with ExitStack() as stack:
            for device_type in self.autocast:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            yield


@contextmanager
def cast_cache(enabled: bool) -> Iterator[None]:
    """Whether autocast keeps the casts of parameters while the body runs.

    Uses of a parameter that share a cast sum up their gradients in its dtype, if autograd goes through
    them in one call. The cache belongs to the process: a lane that leaves autocast empties it for all.
    So what a cast is shared by would depend on the way that a pipe takes, and on timing.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def default_device() -> torch.device:
    """Where the calling thread makes tensors. As ``torch.get_default_device()``, which in torch 2.6 does
    not know of ``with device:``."""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() > 0 else []
    for mode in reversed(modes):
        if isinstance(mode, DeviceContext):
            return mode.device
    return torch.device("cpu")


# Not in torch 2.6, which does not tell.
_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def needs_this_thread() -> bool:
    """Whether the caller has put up something on its thread that is to see all operations, or all that
    graphs save, and would not see what other threads do: a mode, as for counting operations, the
    profiler, or hooks on saved tensors, as for keeping them elsewhere."""
    if is_observed():
        return True
    if torch._C._len_torch_function_stack() > 0:
        # The default device is carried.
        modes = _get_current_function_mode_stack()
        if any(not isinstance(mode, DeviceContext) for mode in modes):
            return True
    return _saved_tensors_hooks is not None and _saved_tensors_hooks(True) is not None
