"""The caller's thread-local torch state, carried into lanes and into recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from pipekernels._torch_private import DeviceContext, function_modes, has_saved_tensors_hooks
from pipekernels.device.restoring import Autocast, autocast_as, entered, restoring
from pipekernels.local_ops.dispatch import is_observed


class CallerContext:
    """Inference mode, autocast and default device of the thread that makes it.

    Grad mode is not among them: the engine sets it for every task.
    """

    def __init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = Autocast.now()
        device = default_device()
        self.default_device = None if device.type == "cpu" else device

    def applied(self) -> AbstractContextManager[None]:
        """Run the body, on any thread, as if on the thread that made this object."""
        inference = self.inference and not torch.is_inference_mode_enabled()
        device = self.default_device
        if inference or (device is not None and device != default_device()):
            return self._applied(inference)
        return autocast_as(self.autocast)

    @contextmanager
    def _applied(self, inference: bool) -> Iterator[None]:
        device = self.default_device
        with (
            # On lanes of other threads, which Ctrl-C does not reach: its end cannot be retried.
            torch.inference_mode() if inference else nullcontext(),
            nullcontext() if device is None else entered(device),
            autocast_as(self.autocast),
        ):
            yield

    def without_autocast(self) -> AbstractContextManager[None]:
        """Run the body, on the thread that made this object, without its autocast."""
        return autocast_as(self.autocast._replace(on_cpu=False, on_cuda=False))


class cast_cache(restoring):
    """Whether autocast keeps the casts of parameters while the body runs.

    Uses of a parameter that share a cast sum up their gradients in its dtype, if autograd goes
    through them in one call. The cache belongs to the process: a lane that leaves autocast empties
    it for all. So what a cast is shared by would depend on the way that a pipe takes, and on
    timing.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__(
            partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        )
        self._enabled = enabled

    def __enter__(self) -> None:
        super().__enter__()
        torch.set_autocast_cache_enabled(self._enabled)


def default_device() -> torch.device:
    """Where the calling thread makes tensors. As ``torch.get_default_device()``, which in torch 2.6
    does not know of ``with device:``."""
    for mode in reversed(function_modes()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return torch.device("cpu")


def needs_this_thread() -> bool:
    """Whether the caller has put up something on its thread that is to see all operations, or all
    that graphs save, and would not see what other threads do: a mode, as for counting operations,
    the profiler, or hooks on saved tensors, as for keeping them elsewhere."""
    if is_observed():
        return True
    # The default device is carried.
    if any(not isinstance(mode, DeviceContext) for mode in function_modes()):
        return True
    return has_saved_tensors_hooks()
