"""Reversible replacement of a module's forward."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Override:
    """Replaces the forward of ``module`` by ``function(module, original, args, kwargs)``.

    The reference to the module is weak: a cycle would keep a dropped model's memory until the next
    garbage collection.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._function = function
        # A replacement made by other code.
        self._former: Callable[..., Any] | None = vars(module).get("forward")
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._owner(), self._original(), args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's, which callers such as Hugging Face's Trainer inspect."""
        return inspect.signature(self._original())

    def check(self) -> None:
        """Raise a RuntimeError if the forward was replaced again later: it cannot be removed."""
        module = self._owner()
        if vars(module).get("forward") is not self:
            raise RuntimeError(
                f"the forward of a {type(module).__name__} was replaced after this package "
                "had replaced it; take the later one away first"
            )

    def remove(self) -> None:
        """Restore the former one; call :meth:`check` first."""
        del self._owner().forward
        if self._former is not None:
            self._owner().forward = self._former

    def _original(self) -> Callable[..., Any]:
        if self._former is not None:
            return self._former
        # Not a bound method: torch.compile would look up its name and find this object.
        return partial(type(self._owner()).forward, self._owner())

    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the module of this forward has been freed; keep a reference to it"
            )
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))
