"""Arguments that SPMD pipelines refuse before any communication."""

from __future__ import annotations

import pytest
from torch import nn

from pipekernels import PipelineModule, execute_pipeline


@pytest.mark.parametrize("count", [True, False, 0])
def test_bools_and_zero_are_not_numbers_of_micro_batches(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_microbatches is {count!r}; it must be an integer"):
        execute_pipeline(nn.Tanh(), None, num_microbatches=count, model_axis_name="pipe")
    with pytest.raises(ValueError, match=f"num_microbatches is {count!r}; it must be an integer"):
        PipelineModule("pipe", count, nn.Tanh)
