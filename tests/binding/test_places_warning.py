"""Warnings of ranks that share cores or float over memory nodes, on made-up hosts."""

import os
import warnings
from pathlib import Path

import pytest
from support.hosts import EIGHT_NODES, FOUR_NODES, TWO_SOCKETS, all_cpus, host, topology_of

from pipekernels.binding import warning
from pipekernels.binding.places import places

ONE_NODE = {"sockets": 1, "nodes": 1, "cores": 6, "smt": 2}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", [TWO_SOCKETS, FOUR_NODES, EIGHT_NODES], ids=str)
def test_ranks_that_pipekernels_binds_are_in_their_places(
    tmp_path: Path, shape: dict[str, int], ranks: int
) -> None:
    bound = [place.cpus for place in places(topology_of(tmp_path, shape), ranks)]
    assert warning.problem(bound, tmp_path) is None


def test_ranks_with_parts_of_two_nodes(tmp_path: Path) -> None:
    bound = [place.cpus for place in places(topology_of(tmp_path, FOUR_NODES), 3)]
    found = warning.problem(bound, tmp_path)
    assert found is not None and found.startswith("rank 0 of this host may run on memory nodes [0,")


def test_ranks_float_over_nodes(tmp_path: Path) -> None:
    host(tmp_path, **TWO_SOCKETS)
    everywhere = all_cpus(**TWO_SOCKETS)
    found = warning.problem([everywhere] * 2, tmp_path)
    assert found.startswith("rank 0 of this host may run on memory nodes [0, 1], as may others")
    assert "`pipekernels run`" in found
    assert warning.problem([everywhere], tmp_path) is None  # Nobody else is there.


def test_on_one_node_ranks_may_float(tmp_path: Path) -> None:
    host(tmp_path, **ONE_NODE)
    assert warning.problem([all_cpus(**ONE_NODE)] * 6, tmp_path) is None


def test_ranks_share_cores(tmp_path: Path) -> None:
    host(tmp_path, **ONE_NODE)
    found = warning.problem([all_cpus(**ONE_NODE)] * 7, tmp_path)
    assert found.startswith("ranks 0, 1, 2, 3, 4, 5, 6 of this host share 6 core(s)")
    assert "start at most 6 ranks" in found


def test_hardware_threads_of_one_core_are_one_core(tmp_path: Path) -> None:
    host(tmp_path, **ONE_NODE)
    found = warning.problem([[0], [6], [1, 2, 3]], tmp_path)
    assert found is not None and found.startswith("ranks 0, 1 of this host share 1 core(s)")
    assert warning.problem([[0], [1], [2]], tmp_path) is None


def test_a_process_is_warned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warning, "_was_checked", False)
    pids = [os.getpid()] * (len(os.sched_getaffinity(0)) + 1)
    with pytest.warns(RuntimeWarning, match="share"):
        warning.check_places_once(pids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warning.check_places_once(pids)


def test_a_rank_that_has_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warning, "_was_checked", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warning.check_places_once([2**22 + 1])  # Above the largest pid of Linux.
