"""Reversible replacement of a method of one module."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Override:
    """Replaces the method ``name`` of ``module`` by ``function(module, original, args, kwargs)``.

    The reference to the module is weak: a cycle would keep a dropped model's memory until the next
    garbage collection.
    """

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._function = function
        # A replacement made by other code.
        self._former: Callable[..., Any] | None = vars(module).get(name)
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._owner(), self._original(), args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's, which callers such as Hugging Face's Trainer inspect."""
        return inspect.signature(self._original())

    def check(self) -> None:
        """Raise a RuntimeError if the method was replaced again later: it cannot be removed."""
        module = self._owner()
        if vars(module).get(self._name) is not self:
            raise RuntimeError(
                f"the {self._name} of a {type(module).__name__} was replaced after this package "
                "had replaced it; take the later one away first"
            )

    def remove(self) -> None:
        """Restore the former method; call :meth:`check` first."""
        delattr(self._owner(), self._name)
        if self._former is not None:
            setattr(self._owner(), self._name, self._former)

    def _original(self) -> Callable[..., Any]:
        if self._former is not None:
            return self._former
        # Not a bound method: torch.compile would look up its name and find this object.
        return partial(getattr(type(self._owner()), self._name), self._owner())

    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                f"the module whose {self._name} this is no longer exists; keep a reference to it"
            )
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))
