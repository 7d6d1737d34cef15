"""Decoding with a Llama of 110 M parameters on two CPU ranks, against one process and transformers.

Greedy ``generate`` of transformers with a KV cache, one sequence. Every system gives the same
number of tokens; in float32 these are checked against those of one process.

* ``one thread``, ``two threads``: the bare model in one process; one thread is the base of
  ``speed-up``.
* ``pipekernels``: ``tensor_parallelize(model, "auto", comm)`` on two processes of one thread each,
  as all below.
* ``transformers``: its own ``tp_plan="auto"``, on Gloo; then the same on the ``torch.distributed``
  backend ``pipekernels``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.processes import Processes
from bench.report import speed_ups

RANKS = 2
PROMPT, NEW = 32, 128
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
CASES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONDITIONS = {
    "model": "Llama, 12 layers of width 768, 12 heads, inner width 2048, 32000 tokens, tied: 110 M "
    "parameters",
    "work": f"prompt of {PROMPT} tokens, then {NEW} new ones, greedy; seconds per new token",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, candidates in turn, medians over turns",
}

Serve = Callable[[Callable[[], float]], None]


def save_model(folder: Path) -> None:
    """A model with random weights in float32, and the tokens that it generates."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    model.save_pretrained(folder)
    (folder / "tokens.json").write_text(json.dumps(generate(model).tolist()))


def generate(model: Any) -> torch.Tensor:
    """Prompt and new tokens."""
    prompt = torch.randint(3, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    found: torch.Tensor = model.generate(prompt, attention_mask=prompt != 0, **options)
    return found


def serve_tokens(model: Any, folder: Path, serve: Serve, threads: int = 1) -> None:
    """Check the tokens, then serve turns.

    Raises:
        AssertionError: a model in float32 generates others than the one in ``folder`` did.
    """
    torch.set_num_threads(threads)
    model = model.eval()
    expected = json.loads((folder / "tokens.json").read_text())
    assert model.dtype != torch.float32 or generate(model).tolist() == expected

    def turn() -> float:
        begin = time.perf_counter()
        found = generate(model)
        seconds = time.perf_counter() - begin
        assert found.shape == (1, PROMPT + NEW)
        return seconds / NEW

    serve(turn)


def _loaded(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def _join(backend: str, rank: int, port: int) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )


def _bare(rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype, n: int) -> None:
    serve_tokens(_loaded(folder, dtype), folder, serve, n)


def _pipekernels(rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype) -> None:
    from pipekernels import Communicator
    from pipekernels.tensor_parallel import tensor_parallelize

    _join("gloo", rank, port)
    with Communicator.from_process_group() as comm:
        model = tensor_parallelize(_loaded(folder, dtype), "auto", comm)
        serve_tokens(model, folder, serve)


def _transformers(
    rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype, backend: str
) -> None:
    if backend == "pipekernels":
        import pipekernels.distributed  # noqa: F401 - registers the backend
    _join(backend, rank, port)
    serve_tokens(_loaded(folder, dtype, tp_plan="auto", tp_size=RANKS), folder, serve)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every candidate with both dtypes, in turn."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        save_model(folder)
        for case, dtype in CASES.items():
            runners = {
                "one thread": Processes(1, _bare, folder, dtype, 1),
                "two threads": Processes(1, _bare, folder, dtype, RANKS),
                "pipekernels": Processes(RANKS, _pipekernels, folder, dtype),
                "transformers, Gloo": Processes(RANKS, _transformers, folder, dtype, "gloo"),
                "transformers, backend pipekernels": Processes(
                    RANKS, _transformers, folder, dtype, "pipekernels"
                ),
            }
            try:
                rounds = 2 if args.quick else 9
                samples = harness.alternate(runners, warmup=1, rounds=rounds)
            finally:
                for runner in runners.values():
                    runner.close()
            for candidate, figures in harness.against(samples, "one thread").items():
                rows.append({"case": case, "candidate": candidate, **figures})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A row per candidate and dtype, in seconds per token."""
    return speed_ups(rows, "one thread")
