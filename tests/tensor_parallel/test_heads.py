"""Which features a rank holds where heads of attention stay whole."""

import torch
from support.checks import assert_raises
from support.ranks import on_ranks, run_threads
from torch import nn

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear, tensor_parallelize
from pipekernels.tensor_parallel.functional import gather_from_ranks


@on_ranks(3, run_threads)
def test_errors(comm: Communicator) -> None:
    row, column = RowParallelLinear, ColumnParallelLinear
    six = {"heads": (6, 2)}
    for message, call, args, options in (
        ("cannot cut 13 features between 6 heads over 2", column, (4, 13), six),
        ("6 features between 6 heads over 4", column, (4, 12), {"heads": (6, 4)}),
        ("3 ranks cannot share 2 attention heads", row, (12, 4), {"heads": (2, 2)}),
        ("3 ranks cannot share 2 attention heads", column, (4, 12), {"heads": (2, 1)}),
        ("goes with gather_output=False", column, (4, 12), six | {"gather_output": True}),
        ("with input_is_parallel=True", row, (12, 4), six | {"input_is_parallel": False}),
    ):
        assert_raises(ValueError, message, call, *args, comm=comm, **options)
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 4))
    for word in ("column/6", "row/6/2/1", "row/six/2", "embedding/6/2", "row_split_input/6/2"):
        message = r"plan\['0'\] must be one of 'column'"
        assert_raises(ValueError, message, tensor_parallelize, model, {"0": word}, comm)
    message = "'0' cannot be made 'column/0/1': cannot cut 0 features between 0 heads"
    assert_raises(ValueError, message, tensor_parallelize, model, {"0": "column/0/1"}, comm)
    x = torch.ones(2, 3)
    message = r"holds [12] of 4 features over 3 ranks, but x has shape \(2, 3\)"
    assert_raises(ValueError, message, gather_from_ranks, x, comm, [2, 1, 1])
