"""Benchmarks of GPUs, on the CPU with tiny sizes, and with Gloo in NCCL's place on CPU ranks."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.programs import run
from support.ranks import leaves_the_group

from bench import harness, registry, timing
from bench.gpu import __main__ as gpu
from bench.gpu import nccl, nccl_peers, sanitized
from bench.harness import Options, Turns
from bench.report import pages, tables
from pipekernels import Communicator

pytestmark = [pytest.mark.full, pytest.mark.project, leaves_the_group]

ROOT = Path(__file__).parents[2]
QUICK = Options(quick=True, seconds=60.0)
ON_ONE = [name for name in registry.GPU if name != "nccl"]


@pytest.mark.parametrize("name", ON_ONE)
def test_every_program_runs_and_its_table_is_made(name: str) -> None:
    module = registry.find(name)
    rows = [row for found in gpu.run(module, QUICK) for row in found]
    assert rows and not any("error" in row or row.get("wrong") for row in rows)
    machine = {"gpu": "Some GPU", "cpu": "Some CPU", "cores": 16, "torch": "2.11.0"}
    record = {"name": name, "date": "today", "commit": "0", "machine": machine}
    record |= {"conditions": module.CONDITIONS, "rows": rows}
    page = pages.render([json.loads(json.dumps(record))])
    assert page.startswith("**Some GPU, Some CPU, 16 cores, torch 2.11.0**\n\n")
    assert ("|" in page or name == "gpu.soak") and "Failed" not in page


@pytest.mark.parametrize("part", sanitized.PARTS)
def test_programs_for_the_sanitizer_are_correct(part: str, device: torch.device) -> None:
    sanitized.PARTS[part](device)


def do_nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize(("needed", "tries"), [(1, 1), (timing.HEAD_START * 4, 2)])
def test_device_time_is_measured_again_until_launches_were_ahead(
    needed: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device must sleep ``needed`` cycles for all launches to be queued in the meantime."""
    slept: list[int] = []
    event = SimpleNamespace(
        record=do_nothing, synchronize=do_nothing, query=lambda: slept[-1] < needed,
        elapsed_time=lambda end: 6.0,
    )  # fmt: skip
    device = SimpleNamespace(
        Event=lambda enable_timing: event, _sleep=slept.append, synchronize=do_nothing
    )
    monkeypatch.setattr(timing.torch, "cuda", device)
    calls: list[int] = []
    seconds = timing.device_seconds(lambda: calls.append(1), torch.device("cuda"), 3)
    assert seconds == pytest.approx(2e-3)
    assert len(calls) == 3 * tries and len(slept) == tries


def test_a_case_that_fails_is_a_row_and_late_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def turns(case: str, names: list[str], options: Options) -> Turns:
        clock[0] += 10.0
        if case == "b":
            raise ValueError("no such case\nSearch for\nCompile with")
        return Turns({name: lambda: 1.0 for name in names}, 0, 2)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    module: Any = SimpleNamespace(GPU=dict.fromkeys("abcd", "x"), turns=turns, SHARES={"d": 0.4})
    first, failed, third, note = (
        row for found in gpu.run(module, Options(seconds=50.0)) for row in found
    )
    assert [(row["case"], row["median"]) for row in (first, third)] == [("a", 1.0), ("c", 1.0)]
    assert failed == {"case": "b", "error": "ValueError: no such case"}
    assert note["note"].startswith("1 cases are left out")
    assert tables.table([first, failed], [], "x").endswith("* b: ValueError: no such case")


def test_results_are_kept_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(case: str, options: Options) -> list[dict[str, Any]]:
        if case == "second":
            raise KeyboardInterrupt
        return [{"x": 1}]

    cases = {"first": (), "second": ()}
    module = SimpleNamespace(__doc__="What it does.", CONDITIONS={"a": 1}, rows=rows, GPU=cases)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu.registry, "find", lambda name: module)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "micro_batch"])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert json.loads((tmp_path / "gpu.micro_batch.json").read_text())["rows"] == [{"x": 1}]
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "micro_batch", "--device", "cpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "results on cpu mean nothing" in capsys.readouterr().err


# ---- NCCL's program ----

SPOILED = """
import sys
from bench.gpu import __main__ as gpu, nccl
from pipekernels import Communicator

def spoil(name):
    right = getattr(Communicator, name)

    def wrong(self, tensor, *args, **options):
        result = right(self, tensor, *args, **options)
        if self.rank == 1:
            options.get("out", tensor).view(-1)[3] = -1
        return result

    setattr(Communicator, name, wrong)

for name in nccl.PLACES:
    spoil(name)
sys.exit(gpu.main())
"""


def start(*command: str, code: int) -> str:
    """What a command prints, without a launcher's variables."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT)}
    options: Any = {"code": code, "timeout": 200, "cwd": ROOT, "env": environment}
    return run(sys.executable, *command, **options).stdout


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_nccl_starts_its_own_ranks() -> None:
    printed = start("-m", "bench.gpu", "nccl", "--device", "cpu", "--quick", code=0)
    assert "0 elements are wrong; 0 cases failed" in printed
    for operation in nccl.PLACES:
        assert f"**{operation}; 2 ranks**" in printed
    assert "| 1024 | 512 | sum | " in printed  # All-reduce: all elements;
    assert "| 1024 | 256 | sum | " in printed  # reduce-scatter: those of a rank.
    assert f"| {nccl.PLAIN} | " in printed and "| .to / it | size" in printed


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_nccl_counts_an_element_that_is_wrong_on_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "spoiled.py"
    script.write_text(SPOILED)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = start(*torchrun, str(script), "nccl", "--device", "cpu", "--quick", code=1)
    begins = tuple(f"| {operation}" for operation in nccl.PLACES)
    lines = [line for line in printed.splitlines() if line.startswith(begins)]
    wrong = [line.rstrip("| ").split()[-1] for line in lines]
    collectives = [case for case in nccl.GPU_QUICK if "bytes" in case]
    # One element in checks before and after: none of Gloo's, two of ours.
    assert wrong == ["0", "2"] * len(collectives), printed
    assert "0 cases failed" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_nccl_says_what_there_is_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "nccl"])
    with pytest.raises(SystemExit, match="2 to 8 GPUs, and torch .* sees 0.*--device cpu --quick"):
        gpu.main()


# ---- NCCL's peers with symmetric memory, pretended on the CPU ----


@pytest.fixture
def alone(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[nccl.Ranks]:
    """The only rank. torch has no multicast; NCCL's pools are the CPU's."""
    from torch.distributed import _symmetric_memory

    def no_multicast(*_: Any) -> None:
        raise RuntimeError("there is no multicast")

    operations = SimpleNamespace(
        one_shot_all_reduce=lambda x, *_: x.clone(),
        two_shot_all_reduce_=lambda x, *_: x,
        multimem_all_reduce_=no_multicast,
    )
    backend = mock.Mock(mem_allocator="NCCL's")
    monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", do_nothing)
    monkeypatch.setattr(torch.ops, "symm_mem", operations)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: allocator)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", contextlib.nullcontext)
    monkeypatch.setattr(nccl_peers, "backend_of", lambda device: backend)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (communicator,) = Communicator.threads(1)
    control = dist.new_group(backend="gloo")
    ranks = nccl.Ranks(0, 1, torch.device("cpu"), "Gloo", communicator, control)
    monkeypatch.setattr(nccl, "joined", lambda device_type: ranks)
    yield ranks
    registered, dropped = backend.register_mem_pool, backend.deregister_mem_pool
    assert registered.call_count == dropped.call_count  # A case leaves none behind.
    if ranks.communicator is not None:
        ranks.communicator.close()
    dist.destroy_process_group()


ONE_SHOT, TWO_SHOT = (f"{nccl_peers.TORCH}, {name}" for name in ("one_shot", "two_shot"))


def wrong(case: str) -> dict[str, int]:
    """The wrong elements of each candidate."""
    (found,) = harness.measure(nccl, {case: ()}, QUICK)
    return {row["candidate"]: row["wrong"] for row in found.rows}


def test_peers_with_symmetric_memory_are_checked_and_those_that_fail_are_named(
    alone: nccl.Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = (row["note"] for row in nccl.before(QUICK))
    multimem = f"{nccl_peers.TORCH}, multimem"
    assert note == f"{multimem} is left out: RuntimeError: there is no multicast"
    case = "{}, symmetric tensors, {} place, 1024 bytes, bfloat16"
    ours, theirs = {nccl.OURS: 0, "Gloo": 0}, {nccl_peers.NCCL_SYMMETRIC: 0}
    all_reduce = case.format("all_reduce", "in")
    assert wrong(all_reduce) == ours | {ONE_SHOT: 0, TWO_SHOT: 0} | theirs
    assert wrong(case.format("reduce_scatter", "out")) == ours | theirs
    assert wrong(case.format("all_gather", "out")) == ours | theirs
    assert wrong(case.format("broadcast", "in")) == ours
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce", lambda x, *_: x + 1)
    assert wrong(all_reduce)[ONE_SHOT] == 2 * 512  # Each, before and after.


def test_without_peer_access_the_backend_and_pipes_are_measured(
    alone: nccl.Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (2, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert alone.communicator is not None
    alone.communicator.close()
    alone.communicator = None
    assert any("between GPUs 0 and 2: " in row["note"] for row in nccl.before(QUICK))
    assert wrong("all_reduce, ordinary tensors, in place, 1024 bytes, bfloat16") == {"Gloo": 0}
    (found,) = harness.measure(nccl, {"pipe, 2 rows": ()}, QUICK)
    assert set(found.samples) == {nccl.OURS, nccl.BY_HAND}
