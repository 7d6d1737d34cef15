"""A layer whose forward is a given function."""

from collections.abc import Callable
from typing import Any

from torch import nn


class FunctionLayer(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
