"""Generation for eight prompts with a Llama of 110 M parameters in two stages on two CPU cores.

Greedy ``generate`` of transformers with KV caches.

* ``in turn``: one micro-batch after the other, and so one stage after the other, on one thread; the
  base of ``speed-up``.
* ``whole batch, one thread``, ``whole batch, two threads``: the bare model and all prompts at once.
* ``pipelined, 2``, ``pipelined, 4``: ``generate_pipelined`` with as many micro-batches, two stages
  of one thread each.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from bench import harness
from bench.decode import SHAPE
from bench.processes import Processes
from bench.report import speed_ups

PROMPTS, LENGTH, NEW = 8, 32, 32
MIDDLE = "model.layers.6"
CASES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONDITIONS = {
    "model": "Llama, 12 layers of width 768, 12 heads, inner width 2048, 32000 tokens, tied: 110 M "
    "parameters; the second stage begins at the seventh layer",
    "work": f"{PROMPTS} prompts of {LENGTH} tokens, then {NEW} new ones each, greedy; seconds per "
    "new token of all prompts",
    "timing": "processes in turn, medians over turns",
}


def _worker(rank: int, port: int, serve: Any, dtype: torch.dtype, way: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from pipekernels import generate_pipelined

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).to(dtype).eval()
    prompts = torch.randint(3, 32000, (PROMPTS, LENGTH))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    kind, _, number = way.partition(", ")

    def generate() -> torch.Tensor:
        if kind == "pipelined":
            mask = torch.ones_like(prompts)
            return generate_pipelined(
                model, prompts, [MIDDLE], chunks=int(number), attention_mask=mask, **options
            )
        parts = prompts.chunk(2) if kind == "in turn" else [prompts]
        found = [model.generate(p, attention_mask=torch.ones_like(p), **options) for p in parts]
        return torch.cat(found)

    def turn() -> float:
        begin = time.perf_counter()
        assert generate().shape == (PROMPTS, LENGTH + NEW)
        return (time.perf_counter() - begin) / (PROMPTS * NEW)

    torch.set_num_threads(1 if kind == "in turn" or number == "one thread" else 2)
    if dtype == torch.float32:
        assert torch.equal(generate()[0], model.generate(prompts[:1], **options)[0])
    serve(turn)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every way with both dtypes, in turn."""
    ways = ["in turn", "whole batch, one thread", "whole batch, two threads"]
    ways += ["pipelined, 2", "pipelined, 4"]
    rows: list[dict[str, Any]] = []
    for case, dtype in CASES.items():
        runners = {way: Processes(1, _worker, dtype, way) for way in ways}
        try:
            samples = harness.alternate(runners, warmup=1, rounds=2 if args.quick else 5)
        finally:
            for runner in runners.values():
                runner.close()
        for candidate, figures in harness.against(samples, "in turn").items():
            rows.append({"case": case, "candidate": candidate, **figures})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A row per way and dtype, in seconds per token."""
    return speed_ups(rows, "in turn")
