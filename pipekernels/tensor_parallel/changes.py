"""Changes to modules that ``tensor_unparallelize`` undoes. The modules record them, so that a copy
of a model has them too."""

from __future__ import annotations

from typing import Any

from torch import nn

_NOTED = "_pipekernels_changes"
_ABSENT = ("absent",)


def set_attribute(module: nn.Module, name: str, value: object) -> None:
    """Set an attribute that is not a parameter, buffer or module."""
    before = vars(module).get(name, _ABSENT)
    vars(module).setdefault(_NOTED, {}).setdefault(name, before)
    setattr(module, name, value)


def add_forward_pre_hook(module: nn.Module, hook: Any, *, with_kwargs: bool = False) -> None:
    """``module.register_forward_pre_hook``. If ``hook`` has a method ``release``, it is called with
    the module when the hook is removed."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    vars(module).setdefault(_NOTED, {}).setdefault("_forward_pre_hooks", []).append(handle.id)


def add_forward_hook(module: nn.Module, hook: Any, *, always_call: bool = False) -> None:
    """``module.register_forward_hook``."""
    handle = module.register_forward_hook(hook, always_call=always_call)
    vars(module).setdefault(_NOTED, {}).setdefault("_forward_hooks", []).append(handle.id)


def undo_changes(module: nn.Module) -> None:
    """Undo what the functions above did to ``module``."""
    noted = vars(module).pop(_NOTED, {})
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):
        for key in noted.pop(hooks, ()):
            hook = getattr(module, hooks).pop(key)
            if hasattr(hook, "release"):
                hook.release(module)
    for name, before in noted.items():
        if before == _ABSENT:  # Equal, not the same: it may be a deep copy.
            delattr(module, name)
        else:
            setattr(module, name, before)
