"""Outputs of micro-batches are joined only if they can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipekernels import Pipe


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def pipe_of(function, chunks):
    return Pipe(nn.Sequential(Returns(function)), [1], devices=["cpu"], chunks=chunks)


def test_the_state_of_an_lstm_is_not_joined_along_its_layers():
    lstm = nn.LSTM(8, 32, batch_first=True)
    x = torch.randn(16, 5, 8)
    pipe = Pipe(nn.Sequential(lstm), [1], devices=["cpu"], chunks=4)
    with pytest.raises(ValueError, match=r"\(1, 4, 32\) for micro-batch 0, of 4 rows"):
        pipe(x)
    whole = Pipe(nn.Sequential(lstm), [1], devices=["cpu"], chunks=1)
    output, (hidden, cell) = whole(x)
    expected, (expected_hidden, expected_cell) = lstm(x)
    assert torch.equal(output, expected)
    assert torch.equal(hidden, expected_hidden)
    assert torch.equal(cell, expected_cell)


@pytest.mark.parametrize("batch", [8, 7])
def test_a_multiple_of_the_rows_is_joined(batch):
    x = torch.randn(batch, 3, 2)
    assert torch.equal(pipe_of(lambda x: x.flatten(0, 1), 4)(x), x.flatten(0, 1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(0, keepdim=True),
        lambda x: x[x[:, 0] > 0],
        lambda x: x[:, : int(x[0, 1])],
    ],
    ids=["reduced", "filtered", "other features"],
)
def test_other_rows_or_features_are_refused(function):
    x = torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, 2.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="joined along dimension 0"):
        pipe_of(function, 2)(x)
