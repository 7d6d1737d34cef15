"""The list of all benchmarks, by what they run on: CPU ranks, one GPU, or several.

A benchmark is a module that has

* ``CANDIDATES``: the candidates of each case, by its name; ``QUICK``: the same for the quick form;
* ``turns(case, names, options)``: the :class:`bench.harness.Turns` of a case; or, where cases are
  not measured one after another, ``measure(plan, options)``, which yields the rows of each case of
  ``plan``, in its order;
* ``BASE``: the candidate that the others are compared with: what a user would pick instead;
* ``CONDITIONS``, for the result file and the page made of it;
* ``COLUMNS``, further fields of rows, where pages have a row per candidate;
  ``table(rows, others)``, if :func:`bench.report.tables.table` is not enough; ``plot(rows, path)``,
  if a page shows a plot; ``UNIT`` of its samples, if that is not ``"seconds"``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

# Modules of the benchmarks on CPU ranks, by name.
CPU = {
    "accuracy": "bench.accuracy",
    "collectives": "bench.collectives",
    "decode": "bench.decode",
    "engine": "bench.pipeline.engine",
    "memory": "bench.pipeline.memory",
    "micro_batch": "bench.micro_batch",
    "serve": "bench.serve",
    "steps": "bench.distributed.steps",
    "tensor_parallel": "bench.tensor_parallel",
    "torch_distributed": "bench.distributed.calls",
    "train_step": "bench.pipeline.train_step",
}
# Benchmarks on one GPU, with cases ``GPU`` and ``GPU_QUICK``.
GPU = {
    "gpu.micro_batch": "bench.micro_batch",
    **{
        f"gpu.{name}": f"bench.gpu.{name}"
        for name in ("pipe", "all_reduce", "p2p_copy", "soak", "sharded_gemm")
    },
    "nccl": "bench.gpu.nccl",  # On several.
}
OTHERS = {"soak": "bench.report.soak"}  # Tests whose results are on pages.


def plan(name: str, quick: bool) -> Mapping[str, Sequence[str]]:
    """The candidates of each case of a benchmark."""
    field = ("GPU", "GPU_QUICK") if name in GPU else ("CANDIDATES", "QUICK")
    found: Mapping[str, Sequence[str]] = getattr(find(name), field[quick], {})
    return found


def find(name: str) -> ModuleType:
    """The module of ``name``."""
    return importlib.import_module((CPU | GPU | OTHERS)[name])
