"""The comparison with NCCL, with Gloo in its place on CPU ranks, through the same code."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import leaves_the_group

from bench import harness, timing
from bench.gpu import __main__ as gpu
from bench.gpu import nccl, nccl_peers, threads
from bench.gpu.nccl import OURS, Ranks
from bench.gpu.nccl_peers import NCCL_SYMMETRIC, TORCH
from bench.harness import Options
from bench.report import pages
from pipekernels import Communicator

pytestmark = [pytest.mark.full, pytest.mark.project, leaves_the_group]

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
QUICK = Options(quick=True)
Row = dict[str, Any]

# ---- whole runs ----


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, without a launcher's variables."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.processes
def test_it_starts_its_own_ranks() -> None:
    done = start("-m", "bench.gpu", "nccl", "--device", "cpu", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 elements are wrong; 0 cases failed" in done.stdout
    for operation in nccl.PLACES:
        assert f"**{operation}; 2 ranks**" in done.stdout
    assert "| 1024 | 512 | sum | " in done.stdout  # All-reduce: all elements;
    assert "| 1024 | 256 | sum | " in done.stdout  # reduce-scatter: those of a rank.
    assert f"| {OURS} | " in done.stdout and "| .to / it | size" in done.stdout


BROKEN = """
import sys
from bench.gpu import __main__ as gpu, nccl
from pipekernels import Communicator

nccl.GPU_QUICK = {case: names for case, names in nccl.GPU_QUICK.items()
                  if case.startswith(("all_reduce", "broadcast", "row"))}
right = Communicator.all_reduce

def wrong(self, tensor, *args, **options):
    right(self, tensor, *args, **options)
    if self.rank == 1:
        tensor.view(-1)[3] = -1
    return tensor

Communicator.all_reduce = wrong
sys.exit(gpu.main())
"""


@pytest.mark.processes
def test_under_torchrun_an_element_that_is_wrong_on_one_rank_is_found(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start(*torchrun, str(script), "nccl", "--device", "cpu", "--quick")
    assert done.returncode != 0
    # In checks before and after, of two sizes and kinds of tensors, and of the layer.
    assert "10 elements are wrong; 0 cases failed" in done.stdout, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| all_reduce")]
    wrong = [line.rstrip("| ").split()[-1] for line in lines]
    assert wrong == ["0", "2"] * 4  # Of Gloo and of ours, in turn.


# ---- one rank ----


@pytest.fixture
def alone(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """The only rank, of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (communicator,) = Communicator.threads(1)
    ranks = Ranks(0, 1, CPU, "Gloo", communicator, dist.new_group(backend="gloo"))
    monkeypatch.setattr(nccl, "joined", lambda device_type: ranks)
    yield ranks
    if ranks.communicator is not None:
        ranks.communicator.close()
    dist.destroy_process_group()


def spoiled(function: Callable[..., torch.Tensor]) -> Any:
    """``function``, whose result gets one wrong element."""

    def call(*args: Any, **options: Any) -> torch.Tensor:
        result = function(*args, **options)
        with torch.no_grad():
            result.view(-1)[-1] = -3
        return result

    return call


def wrong(case: str) -> dict[str, int]:
    rows = next(harness.measure(nccl, {case: ()}, QUICK)).rows
    return {row["candidate"]: row["wrong"] for row in rows if "wrong" in row}


@pytest.mark.parametrize(
    "case", [case for case in nccl.GPU_QUICK if "bytes" in case and "65536" not in case]
)
def test_every_collective_is_checked(
    case: str, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong(case) == {OURS: 0, "Gloo": 0}
    operation = case.partition(",")[0]
    monkeypatch.setattr(Communicator, operation, spoiled(getattr(Communicator, operation)))
    assert wrong(case) == {OURS: 2, "Gloo": 0}


class Backend:
    """NCCL's, with memory pools of the CPU; ``pools`` are those registered now."""

    mem_allocator = "NCCL's"

    def __init__(self) -> None:
        self.pools: list[Any] = []

    def register_mem_pool(self, pool: Any, *, symm: bool) -> None:
        assert symm and pool.allocator == self.mem_allocator
        self.pools.append(pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        self.pools.remove(pool)


def no_multicast(*_: Any) -> None:
    raise RuntimeError("there is no multicast")


@pytest.fixture
def symmetric(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """torch's symmetric memory without multicast, and NCCL's pools, on the CPU."""
    from torch.distributed import _symmetric_memory

    operations = SimpleNamespace(
        one_shot_all_reduce=lambda x, *_: x.clone(),
        two_shot_all_reduce_=lambda x, *_: x,
        multimem_all_reduce_=no_multicast,
    )
    backend = Backend()
    monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda tensor, group: None)
    monkeypatch.setattr(torch.ops, "symm_mem", operations)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda a: SimpleNamespace(allocator=a))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(nccl_peers, "backend_of", lambda device: backend)
    return backend


ONE_SHOT, TWO_SHOT = f"{TORCH}, one_shot", f"{TORCH}, two_shot"


def test_peers_with_symmetric_memory_are_measured_and_checked(
    alone: Ranks, symmetric: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ", symmetric tensors, {} place, 1024 bytes, bfloat16"
    ours = {OURS: 0, "Gloo": 0}
    assert wrong(f"all_reduce{case.format('in')}") == ours | {
        ONE_SHOT: 0, TWO_SHOT: 0, NCCL_SYMMETRIC: 0
    }  # fmt: skip
    assert wrong(f"reduce_scatter{case.format('out')}") == ours | {NCCL_SYMMETRIC: 0}
    assert wrong(f"all_gather{case.format('out')}") == ours | {NCCL_SYMMETRIC: 0}
    assert wrong(f"broadcast{case.format('in')}") == ours
    assert symmetric.pools == []  # A case leaves none behind.
    right = torch.ops.symm_mem.one_shot_all_reduce
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce", spoiled(right))
    assert wrong(f"all_reduce{case.format('in')}")[ONE_SHOT] == 2
    assert wrong("all_reduce, ordinary tensors, in place, 1024 bytes, bfloat16") == ours


def test_peers_that_this_torch_or_gpu_lacks_are_named_with_the_reason(
    alone: Ranks, symmetric: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_symm(pool: Any) -> None:
        raise AssertionError("torch 2.8 does not call this")

    monkeypatch.setattr(symmetric, "register_mem_pool", without_symm)
    notes = [row["note"] for row in nccl.before(QUICK)]
    assert notes[0] == f"{TORCH}, multimem is left out: RuntimeError: there is no multicast"
    assert notes[1].startswith(f"{NCCL_SYMMETRIC} is left out: TypeError: ") and "symm" in notes[1]
    assert len(notes) == 2
    found = wrong("all_reduce, symmetric tensors, in place, 1024 bytes, bfloat16")
    assert set(found) == {OURS, "Gloo", ONE_SHOT, TWO_SHOT}


def test_layer_and_pipe_are_checked(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, pipe = "row-parallel layer, 3 rows", "pipe, 2 rows"
    assert wrong(layer) == {OURS: 0, "Gloo": 0} and wrong(pipe) == {OURS: 0}
    monkeypatch.setattr(nccl, "row_linear", spoiled(nccl.row_linear))
    monkeypatch.setattr(nccl, "by_hand", spoiled(nccl.by_hand))
    assert wrong(layer) == {OURS: 2, "Gloo": 0} and wrong(pipe) == {OURS: 2}


def test_sums_are_exact_in_bfloat16() -> None:
    assert threads.expected(16, 4000, torch.float32, CPU).max() <= 256
    for count in (2, 8):
        _, inner = nccl.FEATURES
        rows = [nccl.ones(rank, count, 5, (1, inner), CPU)[0] for rank in range(count)]
        sums = sum(x.double().sum(1) for x in rows)
        assert sums.min() > 0 and sums.max() <= 256


def test_the_bus_carries_what_nccl_tests_says() -> None:
    assert {operation: timing.bus(operation, 4) for operation in nccl.PLACES} == {
        "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "broadcast": 1.0
    }  # fmt: skip


# ---- tables, files, and what is missing ----


def rows_of() -> list[Row]:
    return [row for rows in gpu.run(nccl, QUICK) for row in rows]


def page_of(rows: list[Row]) -> str:
    record = {
        "name": "nccl", "date": "today", "commit": "0", "rows": rows,
        "conditions": nccl.CONDITIONS, "machine": {"cpu": "some", "cores": 2, "torch": "2"},
    }  # fmt: skip
    return pages.render([json.loads(json.dumps(record))])


def test_rows_are_shown_on_a_page(alone: Ranks) -> None:
    rows = rows_of()
    page = page_of(rows)
    assert "**all_gather; 1 ranks**" in page
    assert "Geometric means of the ratios: pipekernels " in page and "Failed" not in page
    for row in rows:
        if "busbw" in row:
            assert row["algbw"] == pytest.approx(row["size"] / row["median"] / 1e9)
    text = "<!-- bench:nccl -->\n<!-- /bench -->"
    assert pages.UNMEASURED in pages.update(text, {})


def test_without_peer_access_the_backend_is_measured_alone(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (2, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert nccl.pairs_without_access() == ["0 and 2"]
    assert alone.communicator is not None
    alone.communicator.close()
    alone.communicator = None
    rows = rows_of()
    measured = {(row["part"].startswith("Pipe"), row["candidate"]) for row in rows if "part" in row}
    assert measured == {(False, "Gloo"), (True, OURS), (True, ".to")}  # Pipes work.
    assert not any(row.get("wrong") or "error" in row for row in rows)
    assert "No peer access between GPUs 0 and 2: " in page_of(rows)


def test_a_case_that_fails_is_a_row_and_the_others_are_measured(
    alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Communicator.reduce_scatter

    def fail_once(comm: Communicator, *args: Any, **options: Any) -> torch.Tensor:
        monkeypatch.setattr(Communicator, "reduce_scatter", right)
        comm.close()  # As an error on the device does.
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(Communicator, "reduce_scatter", fail_once)
    rows = rows_of()
    (failed,) = (row for row in rows if "error" in row)
    assert failed["case"].startswith("reduce_scatter") and len(rows) == 2 + 22 * 2 - 1
    assert "1024 bytes, bfloat16: RuntimeError: no kernel" in page_of(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_it_says_what_there_is_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "nccl"])
    with pytest.raises(SystemExit, match="2 to 8 GPUs, and torch .* sees 0.*--device cpu --quick"):
        gpu.main()
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit, match="no GPU for rank 3: start at most 0 ranks"):
        nccl.joined("cuda")
