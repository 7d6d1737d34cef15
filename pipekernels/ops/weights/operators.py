"""The operators by which weights compute products, in eager and in compiled programs.

``linear`` is the product of one rank, ``row_linear`` that of a row-parallel layer, summed over the
ranks. From torch 2.10 on the extension has kernels for CPU tensors, which need no Python for a few
rows (``csrc/bindings/operators.cpp``): their time is that of reading the weight. All else is
computed by the methods of :class:`Weight`. An operator gets the tensors of a weight, ``tensor`` and
``scale``, which tell its format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels._torch_private import reference_to, tensors_of
from pipekernels.comm import Communicator
from pipekernels.ops.weights.base import Weight
from pipekernels.ops.weights.dense import DenseWeight
from pipekernels.ops.weights.int8 import Int8Weight


def weight_of(tensor: Tensor, scale: Tensor | None) -> Weight:
    """The weight that has these tensors, in its format."""
    return DenseWeight(tensor) if scale is None else Int8Weight(tensor, scale)


def _linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return weight_of(weight, scale).product(x, bias)


def _row_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, handle: int, scatter: bool
) -> Tensor:
    return weight_of(weight, scale).sum_of_products(x, Communicator.from_handle(handle), scatter)


def _linear_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


def _row_linear_fake(x: Tensor, weight: Tensor, _: Any, handle: int, scatter: bool) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    if scatter:
        shape[0] //= Communicator.from_handle(handle).world_size
    return x.new_empty(shape)


_library = torch.library.Library("pipekernels", "FRAGMENT")


def _define(schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Define an operator. The extension's kernel calls ``kernel`` for what it does not take."""

    # The extension passes tensors as capsules, and takes the result as one.
    def call(*arguments: Any) -> Any:
        values = [a if isinstance(a, int | None) else tensors_of([a])[0] for a in arguments]
        return reference_to(kernel(*values))

    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pipekernels::{name}", fake, lib=_library)
    _backend.python_kernels[name] = call


_define(
    "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor", _linear, _linear_fake
)
_define(
    "row_linear(Tensor x, Tensor weight, Tensor? scale, int comm, bool scatter) -> Tensor",
    _row_linear,
    _row_linear_fake,
)
