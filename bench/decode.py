"""Decoding with a Llama on two CPU ranks, against one process and transformers.

The model has 110 M parameters, in the quick form 37 M. Greedy ``generate`` of transformers with a
KV cache, one sequence. Every system gives the same number of tokens; in float32 these are checked
against those of one process.

* ``one thread``, ``two threads``: the bare model in one process; one thread is the base of
  ``speed-up``.
* ``pipekernels``: ``tensor_parallelize(model, "auto", comm)`` on two processes of one thread each,
  as all below.
* ``transformers``: its own ``tp_plan="auto"``, on Gloo; then the same on the ``torch.distributed``
  backend ``pipekernels``.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.harness import Measured
from bench.processes import Processes, closing
from bench.report.tables import speed_ups, svg

RANKS = 2
PROMPT, NEW = 32, 128
QUICK_NEW, QUICK_LAYERS = 16, 2
SHAPE: dict[str, Any] = {
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
CANDIDATES = dict.fromkeys(
    CASES,
    (
        *("one thread", "two threads", "pipekernels"),
        *("transformers, Gloo", "transformers, backend pipekernels"),
    ),
)
QUICK = {"float32": ("one thread", "two threads", "pipekernels")}
BASE = "one thread"
CONDITIONS = {
    "model": "Llama, 12 layers of width 768, 12 heads, inner width 2048, 32000 tokens, tied: 110 M "
    "parameters",
    "work": f"prompt of {PROMPT} tokens, then {NEW} new ones, greedy; seconds per new token",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, candidates in turn, medians over turns",
}

Serve = Callable[[Callable[[], float]], None]


def save_model(folder: Path, new: int, layers: int) -> None:
    """A model with random weights in float32, and the ``new`` tokens that it generates."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape)).eval()
    model.save_pretrained(folder)
    (folder / "tokens.json").write_text(json.dumps(generate(model, new).tolist()))


def generate(model: Any, new: int) -> torch.Tensor:
    """Prompt and new tokens."""
    prompt = torch.randint(3, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
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
    new = len(expected[0]) - PROMPT
    assert model.dtype != torch.float32 or generate(model, new).tolist() == expected

    def turn() -> float:
        begin = time.perf_counter()
        found = generate(model, new)
        seconds = time.perf_counter() - begin
        assert found.shape == (1, PROMPT + new)
        return seconds / new

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


WORKERS: dict[str, tuple[Any, ...]] = {  # ranks, worker, and its arguments after the dtype
    "one thread": (1, _bare, 1),
    "two threads": (1, _bare, RANKS),
    "pipekernels": (RANKS, _pipekernels),
    "transformers, Gloo": (RANKS, _transformers, "gloo"),
    "transformers, backend pipekernels": (RANKS, _transformers, "pipekernels"),
}


def measure(plan: Mapping[str, Sequence[str]], quick: bool) -> Iterator[Measured]:
    """Every candidate in turn."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        size = (QUICK_NEW, QUICK_LAYERS) if quick else (NEW, SHAPE["num_hidden_layers"])
        save_model(folder, *size)
        for case, names in plan.items():
            runners = {}
            for candidate in names:
                ranks, worker, *arguments = WORKERS[candidate]
                runners[candidate] = Processes(ranks, worker, folder, CASES[case], *arguments)
            with closing(runners):
                samples = harness.alternate(runners, warmup=1, rounds=3 if quick else 9)
            yield harness.compared(case, samples, BASE)


def table(rows: list[dict[str, Any]]) -> str:
    """A row per candidate and dtype, in seconds per token."""
    return speed_ups(rows, BASE)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second over ranks or threads, an axis per dtype, as an SVG file. With one of
    either, every candidate is the bare model."""
    with svg(path, len(CASES)) as axes:
        for axis, case in zip(axes, CASES, strict=True):
            found = {r["candidate"]: 1 / r["median"] for r in rows if r["case"] == case}
            first = found.pop(BASE)
            for name, second in found.items():
                style = {"linewidth": 2.5} if name == "pipekernels" else {"linestyle": "--"}
                label = "threads of one process" if name == "two threads" else f"ranks: {name}"
                axis.plot([1, RANKS], [first, second], marker=".", label=label, **style)
            axis.set(title=f"decoding, {case}", xlabel="ranks, or threads", xticks=[1, RANKS])
        axes[0].set_ylim(bottom=0)  # Of all axes, when all lines are there.
        axes[0].set_ylabel("tokens per second")
        axes[0].legend()
