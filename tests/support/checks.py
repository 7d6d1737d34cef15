"""What many tests check: errors, full states, and the gradients of sharded models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipekernels.tensor_parallel import full_state_dict


def assert_raises(
    error: type[Exception], message: str, call: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """``call(*args, **options)`` raises an ``error`` in which the pattern ``message`` is found."""
    with pytest.raises(error, match=message):
        call(*args, **options)


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same keys in the same order, and the same bits."""
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the keys of the full state, zeros where there is none; they replace the parameters."""
    for parameter in model.parameters():
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    return full_state_dict(model)


def assert_full_gradients(model: nn.Module, plain: nn.Module, **tolerances: Any) -> None:
    """``model``'s are those of ``plain``, which is not sharded; they replace the parameters."""
    found = full_gradients(model)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, **tolerances)
