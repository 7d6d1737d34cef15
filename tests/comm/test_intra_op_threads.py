"""Ranks with several intra-op threads, which copy and add in large calls."""

from dataclasses import replace

import pytest
import torch
from support.ranks import on_ranks, run_processes
from support.sweeps.collectives import Call, make
from support.sweeps.soak import Loss, lose_a_rank

from pipekernels import Communicator

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("threads", [2, 4])
@on_ranks(3)
def test_values_and_different_calls(comm: Communicator, threads: int) -> None:
    torch.set_num_threads(threads)
    for seed in range(24):
        # Sizes around 256 KiB of float32, and much above; their last parts are uneven.
        shape = (comm.world_size * (21_000 + seed % 4 * 65_003),)
        make(comm, replace(Call.draw(seed, comm.world_size), shape=shape))
    for call in (comm.all_reduce, comm.all_gather, comm.broadcast):
        with pytest.raises(ValueError, match="the ranks call different collectives"):
            call(torch.ones(300_000 + comm.rank))
        assert comm.all_reduce(torch.ones(300_000)).eq(3).all()


def lose_a_rank_of_threads(comm: Communicator, seed: int) -> Loss:
    torch.set_num_threads(2 + seed % 2 * 2)
    return lose_a_rank(comm, torch.device("cpu"), seed)


@pytest.mark.parametrize("seed", [10, 11])
def test_a_killed_rank_is_named(seed: int) -> None:
    run_processes(3, lose_a_rank_of_threads, seed, killed=(seed % 3,))
