"""Decoding with a Llama on two CPU ranks, against one process and transformers.

The model has 110 M parameters, in the quick form 37 M. Greedy ``generate`` of transformers with a
KV cache, one sequence. Every system gives the same number of tokens; in float32 these are checked
against those of one process.

* ``one thread``, ``two threads``: the bare model in one process.
* ``pipekernels``: ``tensor_parallelize(model, "auto", comm)`` on two processes of one thread each,
  as all below.
* ``transformers``: its own ``tp_plan="auto"``, on Gloo; then the same on the ``torch.distributed``
  backend ``pipekernels``.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import Options, Turns
from bench.processes import Serve, join, repeated, started
from bench.report.tables import svg

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
BASE = "two threads"
CONDITIONS = {
    "model": "Llama, 12 layers of width 768, 12 heads, inner width 2048, 32000 tokens, tied: 110 M "
    "parameters",
    "work": f"prompt of {PROMPT} tokens, then {NEW} new ones, greedy; seconds per new token",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, candidates in turn, medians over turns",
}


@functools.cache
def saved(new: int, layers: int) -> Any:
    """A folder, until the end of this process, of a model with random weights in float32, and the
    ``new`` tokens that it generates."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tempfile.TemporaryDirectory(dir="/dev/shm")
    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape)).eval()
    model.save_pretrained(folder.name)
    Path(folder.name, "tokens.json").write_text(json.dumps(generate(model, new).tolist()))
    return folder


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
    turn = repeated(lambda: generate(model, new), 1, warmup=0)
    serve(lambda: turn() / new)


def _loaded(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def _bare(rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype, n: int) -> None:
    serve_tokens(_loaded(folder, dtype), folder, serve, n)


def _pipekernels(rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype) -> None:
    from pipekernels import Communicator
    from pipekernels.tensor_parallel import tensor_parallelize

    join("gloo", rank, RANKS, port)
    with Communicator.from_process_group() as comm:
        model = tensor_parallelize(_loaded(folder, dtype), "auto", comm)
        serve_tokens(model, folder, serve)


def _transformers(
    rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype, backend: str
) -> None:
    join(backend, rank, RANKS, port)
    serve_tokens(_loaded(folder, dtype, tp_plan="auto", tp_size=RANKS), folder, serve)


WORKERS: dict[str, tuple[Any, ...]] = {
    "one thread": (1, _bare, 1),
    "two threads": (1, _bare, RANKS),
    "pipekernels": (RANKS, _pipekernels),
    "transformers, Gloo": (RANKS, _transformers, "gloo"),
    "transformers, backend pipekernels": (RANKS, _transformers, "pipekernels"),
}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every candidate."""
    size = (QUICK_NEW, QUICK_LAYERS) if options.quick else (NEW, SHAPE["num_hidden_layers"])
    folder = Path(saved(*size).name)
    return Turns(started(WORKERS, names, folder, CASES[case]), 1, 3 if options.quick else 9)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second: a bar per candidate, an axis per dtype, as an SVG file."""
    with svg(path, len(CASES), height=2.6) as axes:
        for axis, case in zip(axes, CASES, strict=True):
            found = [row for row in rows if row["case"] == case]
            found.sort(key=lambda row: -row["median"])
            names = [
                row["candidate"].replace("transformers,", "transformers' plan,") for row in found
            ]
            colours = ["C0" if "pipekernels" in name else "C7" for name in names]
            speeds = [1 / row["median"] for row in found]
            bars = axis.barh(names, speeds, color=colours)
            axis.bar_label(bars, fmt="%.0f", padding=3)
            axis.set(title=f"Llama of 110 M parameters, {case}", xlabel="tokens/s")
            axis.margins(x=0.15)
