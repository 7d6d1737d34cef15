"""The plan as a table."""

import pytest
import torch
from support.ranks import run_threads
from torch import nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import plan_for


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_hold_what_the_table_says(world_size: int) -> None:
    from support.models import DECODERS, ENCODERS, model_of

    for name in [*DECODERS, *ENCODERS]:
        planned = plan_for(model_of(name), world_size)
        models = [model_of(name) for _ in range(world_size)]
        assert planned.full_parameters == sum(p.numel() for p in models[0].parameters())

        def body(comm: Communicator, models: list[nn.Module] = models) -> int:
            model = tensor_parallelize(models[comm.rank], "auto", comm)
            return sum(parameter.numel() for parameter in model.parameters())

        assert run_threads(world_size, body)[0] == planned.rank_parameters, name
        shapes = [p.shape for p in models[0].parameters() if p.dim() == 2]
        for layer in planned.layers:
            if len(layer.shard) == 2:
                assert layer.shard in shapes or layer.shard[::-1] in shapes


def test_the_text_and_what_is_sent() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Sequential(nn.Embedding(9, 4)),
            *[nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2)],
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8)),
        )
    plan = {
        "0.0": "embedding",
        "[12].0": "column",
        "[12].1": "row",
        "3.0": "replicated_with_grad_allreduce",
        "3.1": "column_gather_output",
    }
    table = """
layer  count  kind                            weight  of a rank  forward       backward
0.0    1      embedding                       9x4     5x4        all-reduce 4  -
*.0    2      column                          6x4     3x4        -             all-reduce 4
*.1    2      row                             4x6     4x3        all-reduce 4  -
3.1    1      column_gather_output            8x4     4x4        all-gather 8  all-reduce 4
3.0    1      replicated_with_grad_allreduce  4       4          -             -
110 of 200 parameters on each of 2 ranks; sent: elements per token and layer
440 bytes on each rank, of which one token reads 360
"""
    assert str(plan_for(model, 2, plan)) == table.strip()


def test_bad_plans_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    with pytest.raises(ValueError, match="'0' cannot be made 'column': cannot shard 6 .* 7 ranks"):
        plan_for(model, 7, {"0": "column"})
    with pytest.raises(ValueError, match="Sequential carries no plan"):
        plan_for(model, 2)
