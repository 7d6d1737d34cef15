"""Compares a model before and after its layers are sharded, on one input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels._torch_private import tree_leaves

Outputs = dict[str, list[Tensor]]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference by dtype, relative to the largest magnitude. Sums in another order differ by
less; another part of a sum, or heads that are mixed up, by about 1."""


def outputs_of(model: nn.Module, inputs: Tensor | Mapping[str, Any]) -> Outputs:
    """The outputs of the modules of ``model`` in one forward in evaluation mode, by name, in the
    order in which modules return."""
    found: Outputs = {}

    def note(name: str, output: Any) -> None:
        leaves = [leaf.clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        found[name] = [leaf for leaf in leaves if leaf.is_floating_point()]

    handles = [
        module.register_forward_hook(lambda _, args, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            if isinstance(inputs, Tensor):
                model(inputs)
            else:
                model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return found


def first_difference(whole: Outputs, sharded: Outputs) -> tuple[str, float] | None:
    """The first module whose outputs differ, and by how much, relative to the largest magnitude.
    Outputs inside sharded parts have other shapes and are skipped."""
    for name, outputs in sharded.items():
        for a, b in zip(whole.get(name, ()), outputs, strict=False):
            if a.shape != b.shape or a.numel() == 0:
                continue
            error = ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item()
            if not error <= _TOLERANCE.get(a.dtype, 1e-1):
                return name or "the model itself", error
    return None
