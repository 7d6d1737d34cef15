"""The modules of a full model: layers that can be sharded, what prevents others, and changes to
modules that stay, which ``tensor_unparallelize`` undoes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipekernels._torch_private import has_hooks, module_has_hooks

REMEDY = (
    "remove it first (parametrize.remove_parametrizations, remove_weight_norm, prune.remove, "
    "handle.remove()), or leave this layer as it is"
)

_CLASSES_OF_TRANSFORMERS = {
    "transformers.pytorch_utils": "Conv1D",
    "transformers.models.falcon.modeling_falcon": "FalconLinear",  # Adds its bias separately.
}


def linear_classes() -> tuple[type[nn.Module], ...]:
    """The classes of layers that can be sharded: ``nn.Linear``, ``Conv1D``, ``FalconLinear``."""
    loaded = [(sys.modules.get(name), cls) for name, cls in _CLASSES_OF_TRANSFORMERS.items()]
    return nn.Linear, *(getattr(module, cls) for module, cls in loaded if module is not None)


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Embedding``, perhaps with a scale, that can be sharded. Models
    may have other classes, which use more than the rows that they look up."""
    cls = type(module)
    is_scaled = issubclass(cls, nn.Embedding) and cls.__name__.endswith("ScaledWordEmbedding")
    return cls is nn.Embedding or (is_scaled and cls.__module__.startswith("transformers."))


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` has the stacked weights of experts, ``[E, ...]``."""
    parameters = module._parameters
    matrices = (parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return [m.dim() for m in matrices if m is not None] == [3, 3]


def features_of(linear: Any) -> tuple[int, int]:
    """Input and output features of an ``nn.Linear`` or ``Conv1D``, by its weight: peft ties linear
    layers by giving them others."""
    first, second = linear.weight.shape
    return (second, first) if isinstance(linear, nn.Linear) else (first, second)


def extras_of(layer: nn.Module) -> str | None:
    """What a sharded layer would lose of ``layer`` (state, forward, hooks), if anything."""
    names = layer.state_dict().keys() - {"weight", "bias"}
    if names:
        return f"additional state ({', '.join(sorted(names))})"
    forwards = [layer_class.forward for layer_class in linear_classes()]
    known = is_embedding(layer) or type(layer).forward in forwards
    if not known or "forward" in vars(layer):
        return "an overridden forward"
    return "hooks" if is_hooked(layer) else None


def check_weights(layer: nn.Module) -> None:
    """Raise a TypeError if a parameter of ``layer`` is of another class than torch's own, such as a
    DTensor or a quantized weight of torchao: its elements would not be those that are sharded."""
    for name, parameter in layer.named_parameters():
        inner = type(parameter.data)
        if type(parameter) is nn.Parameter and inner is torch.Tensor:
            continue
        found = type(parameter) if inner is torch.Tensor else inner
        raise TypeError(
            f"its {name} is a {found.__module__}.{found.__qualname__}, which cannot be cut here; "
            "shard the model of plain floats first, then call fully_shard(), distribute the rest, "
            "or call quantize_weights()"
        )


def is_hooked(layer: nn.Module) -> bool:
    """Whether ``layer`` or one of its parameters has hooks."""
    return module_has_hooks(layer) or any(map(has_hooks, layer.parameters()))


# Modules record their changes, so that a copy of a model has them too.
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
            hook: Any = hooks.pop(key, None)  # Keys are unique in the process.
            if hasattr(hook, "release"):
                hook.release(module)
    for name, before in noted.items():
        if before == _ABSENT:  # Equal, not the same: it may be a deep copy.
            delattr(module, name)
        else:
            setattr(module, name, before)
