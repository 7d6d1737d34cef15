"""DistributedDataParallel around models with sharded layers."""

import pytest
import torch
from support.checks import assert_full_gradients
from support.ranks import on_ranks
from support.reference import gamma
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pipekernels import Communicator, tensor_parallelize


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6)).double()


def batch() -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@on_ranks(2)
def test_over_ranks_with_different_shards_is_refused(comm: Communicator) -> None:
    sharded = tensor_parallelize(model_of(), {"0": "column", "2": "row"}, comm)
    with pytest.raises(RuntimeError, match="over all ranks, of which 2 hold different shards"):
        DistributedDataParallel(sharded)(batch())


@on_ranks(4)
def test_over_ranks_with_equal_shards_averages(whole: Communicator) -> None:
    plain = model_of()
    for _ in range(2):
        plain(batch()).square().mean().backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with Communicator.from_process_group(mesh["tensor"].get_group()) as comm:
        sharded = tensor_parallelize(model_of(), {"0": "column", "2": "row"}, comm)
        ddp = DistributedDataParallel(sharded, process_group=mesh["data"].get_group())
        half = batch().chunk(2)[mesh["data"].get_local_rank()]
        for _ in range(2):
            ddp(half).square().mean().backward()
        # Sums of at most 8 terms, in three layers there and back, of numbers below 10.
        bound = 10 * gamma(6 * 8, 2**-53)
        assert_full_gradients(sharded, plain, rtol=bound, atol=bound)
