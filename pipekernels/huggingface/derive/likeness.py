"""Compares a model with the small copy from which its plan is derived."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any, TypeVar

from torch import nn

from pipekernels.tensor_parallel.full_layer import linear_classes

Description = dict[str, dict[str, Any]]  # Attributes by names of modules.
Value = TypeVar("Value")


def pattern_of(name: str) -> str:
    """``name`` with ``*`` in place of numbers, but for a last one inside of a numbered layer, which
    may be that of a linear layer in ``nn.Sequential``."""
    *outer, last = ["*" if part.isdecimal() else part for part in name.split(".")]
    return ".".join([*outer, name.rpartition(".")[2] if "*" in outer else last])


def named(model: nn.Module, values: Mapping[str, Value]) -> dict[str, Value]:
    """``values``, whose names have ``*``, by the full names of modules in ``model``."""
    names = {name: pattern_of(name) for name, _ in model.named_modules()}
    return {name: values[wild] for name, wild in names.items() if wild in values}


def described(model: nn.Module) -> Description:
    """The class of each module, and its attributes that are flags, words, classes or the code of
    functions. Numbers are left out, as most of them are sizes; linear layers are, as they may have
    become others."""
    found: Description = {}
    inside = "-"
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(getattr(module, "base_layer", module), linear_classes()):
            inside = f"{name}."  # Of an adapter.
            continue
        own = {key: getattr(value, "__code__", value) for key, value in vars(module).items()}
        found[name] = {"class": type(module)} | {
            key: value
            for key, value in own.items()
            if key[0] != "_"
            and key not in ("training", "gradient_checkpointing")
            and isinstance(value, (bool, str, type, CodeType))
        }
    return found


def check_alike(model: nn.Module, copy: Description, planned: Iterable[str]) -> None:
    """Raise ValueError unless the layers that have ``planned`` modules are like those of ``copy``:
    each module like one at the same place, where numbers inside of a layer do not matter."""
    layers = {_layer_of(name) for name in planned}
    known = defaultdict(list)
    for name, there in copy.items():
        known[_place(name)].append(there)
    for name, own in described(model).items():
        others = known[_place(name)]
        if _layer_of(f"{name}.") in layers and own not in others:
            unlike = [
                key for other in others[:1] for key in own | other if own.get(key) != other.get(key)
            ]
            raise ValueError(
                f"{name!r} is not like the small copy from which a plan would be derived "
                f"({', '.join(unlike) or 'it is not there'}); write a plan that names the layers "
                "which ranks can share"
            )


def _layer_of(name: str) -> str:
    """The outermost numbered module around ``name``, or else its parent."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: number + 1])


def _place(name: str) -> str:
    layer = _layer_of(name)
    return layer + pattern_of(name.removeprefix(layer))
