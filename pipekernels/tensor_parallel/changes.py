"""Changes to modules that ``tensor_unparallelize`` undoes. The modules record them, so that a copy
of a model has them too."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_NOTED, _HOOKS = "_pipekernels_changes", "forward hooks"
_ABSENT = ("absent",)


def set_attribute(module: nn.Module, name: str, value: object) -> None:
    """Set an attribute that is not a parameter, buffer or module."""
    before = vars(module).get(name, _ABSENT)
    vars(module).setdefault(_NOTED, {}).setdefault(name, before)
    setattr(module, name, value)


def note_hook(module: nn.Module, handle: RemovableHandle) -> None:
    """Note a forward hook or pre-hook of ``module``, which its registration has given. If the hook
    has a method ``release``, it is called with the module when the hook is removed."""
    vars(module).setdefault(_NOTED, {}).setdefault(_HOOKS, []).append(handle.id)


def undo_changes(module: nn.Module) -> None:
    """Undo what the functions above did to ``module``."""
    noted = vars(module).pop(_NOTED, {})
    for key in noted.pop(_HOOKS, ()):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hook: Any = hooks.pop(key, None)  # Keys are those of all hooks of the process.
            if hasattr(hook, "release"):
                hook.release(module)
    for name, before in noted.items():
        if before == _ABSENT:  # Equal, not the same: it may be a deep copy.
            delattr(module, name)
        else:
            setattr(module, name, before)
