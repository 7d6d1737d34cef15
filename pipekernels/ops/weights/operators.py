"""The operators by which weights compute products, in eager and in compiled programs.

``linear`` multiplies on one rank; ``row_linear`` multiplies in a row-parallel layer, and sums over
the ranks. From torch 2.10 on the extension has kernels for CPU tensors, which need no Python for a
few rows (``csrc/bindings/operators.cpp``) and take as long as a read of the weight. The methods of
:class:`Weight` compute all else. An operator gets the tensors of a weight, ``tensor`` and
``scale``, which tell its format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipekernels import _backend
from pipekernels._torch_private import reference_to, tensors_of
from pipekernels.comm import Communicator
from pipekernels.ops.dispatch import define
from pipekernels.ops.weights.base import Weight
from pipekernels.ops.weights.dense import DenseWeight
from pipekernels.ops.weights.integers import IntegerWeight


def weight_of(tensor: Tensor, columns: int, scale: Tensor | None, zero: Tensor | None) -> Weight:
    """The weight that has these tensors, in its format."""
    if scale is None:
        return DenseWeight(tensor)
    return IntegerWeight(tensor, columns, scale, zero)


def _linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    columns: int,
) -> Tensor:
    return weight_of(weight, columns, scale, zero).product(x, bias)


def _row_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    columns: int,
    handle: int,
    scatter: bool,
) -> Tensor:
    own, comm = weight_of(weight, columns, scale, zero), Communicator.from_handle(handle)
    return own.sum_of_products(x, comm, scatter)


def _linear_fake(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty([*x.shape[:-1], others[-1]])


def _row_linear_fake(x: Tensor, *others: Any) -> Tensor:
    *_, columns, handle, scatter = others
    shape = [*x.shape[:-1], columns]
    if scatter:
        shape[0] //= Communicator.from_handle(handle).world_size
    return x.new_empty(shape)


def _define(schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Define an operator. The extension's kernel calls ``kernel`` for what it does not take."""

    # The extension passes tensors as capsules, and takes the result as one.
    def call(*arguments: Any) -> Any:
        values = [a if isinstance(a, int | None) else tensors_of([a])[0] for a in arguments]
        return reference_to(kernel(*values))

    define(schema, kernel, fake)
    _backend.python_kernels[schema.partition("(")[0]] = call


_WEIGHT = "Tensor x, Tensor weight, Tensor? scale, Tensor? zero"
_define(f"linear({_WEIGHT}, Tensor? bias, int columns) -> Tensor", _linear, _linear_fake)
_define(
    f"row_linear({_WEIGHT}, int columns, int comm, bool scatter) -> Tensor",
    _row_linear,
    _row_linear_fake,
)
