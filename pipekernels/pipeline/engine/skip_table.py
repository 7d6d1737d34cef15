"""Passes skips from stage to stage, and their gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipekernels.pipeline.engine.transport import Transport
from pipekernels.pipeline.stage.skip import Key, SkipRoutes

Skips = Mapping[Key, tuple[torch.Tensor, bool]]
"""Tensors, and whether each wants a gradient."""


class SkipTable:
    """The skips of one mini-batch, and their gradients, from the stage that stashes them until the
    one that pops them. The stages in between run in between, so no synchronisation is needed."""

    def __init__(self, routes: SkipRoutes, devices: Sequence[torch.device]) -> None:
        self._routes = routes
        self._devices = devices
        self._skips: dict[tuple[Key, int], tuple[torch.Tensor, bool]] = {}
        self._versions: dict[tuple[Key, int], int] = {}  # of those that want a gradient
        # Devices of skips before they were copied to another; their gradients are copied back.
        self._source_devices: dict[tuple[Key, int], torch.device] = {}
        self._grads: dict[tuple[Key, int], torch.Tensor | None] = {}

    def leave(self, skips: Skips, m: int, transport: Transport) -> None:
        """Keep skips of micro-batch ``m`` for the stages that pop them."""
        for key, (skip, wants) in skips.items():
            receiver = self._routes.receiver[key]
            device = self._devices[receiver]
            if skip.device != device:
                self._source_devices[key, m] = skip.device
                (skip,) = transport.send([skip], [device], (receiver, m, False))
            self._skips[key, m] = skip, wants
            if wants:
                self._versions[key, m] = skip._version

    def take(self, keys: Sequence[Key], m: int) -> Skips:
        """The skips of micro-batch ``m`` for ``keys``; those that are None are left out.

        Raises:
            RuntimeError: a skip that wants a gradient has been modified in place.
        """
        found = {key: self._skips.pop((key, m)) for key in keys if (key, m) in self._skips}
        for key, (skip, wants) in found.items():
            if wants and skip._version != self._versions[key, m]:
                raise RuntimeError(
                    f"the skip {key[1]!r} was modified in place by a stage between those that "
                    "stash and pop it, so its gradient cannot be computed; stash a copy, or use "
                    "layers that do not work in place"
                )
        return found

    def leave_grads(
        self, grads: Mapping[Key, torch.Tensor | None], m: int, transport: Transport
    ) -> None:
        """Keep the gradients of skips for the stages that stashed them."""
        for key, grad in grads.items():
            device = self._source_devices.get((key, m))
            if device is not None:
                (grad,) = transport.send([grad], [device], (self._routes.sender[key], m, True))
            self._grads[key, m] = grad

    def take_grads(self, keys: Sequence[Key], m: int) -> list[torch.Tensor | None]:
        """The gradients of ``keys``, None for a skip without one."""
        return [self._grads.pop((key, m), None) for key in keys]

    def forget_grads(self) -> None:
        """Drop what a backward that has ended left."""
        self._grads.clear()
