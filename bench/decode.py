"""Decoding with a Llama, and with a mixture of experts, on two CPU ranks, against one process and
transformers.

The Llamas have 110 M and 1.1 B parameters, the mixture 301 M in 8 experts, of which 2 are active;
in the quick form they have 2 layers. Greedy ``generate`` of transformers with a
KV cache, one sequence. Every system gives the same number of tokens; in float32 these are checked
against those of one process.

* ``one thread``, ``two threads``: the bare model in one process.
* ``pipekernels``: ``tensor_parallelize(model, "auto", comm)`` on two processes of one thread each,
  as transformers' below.
* ``compiled``: the two above after ``compile_decoding(model)``.
* ``transformers``: its own ``tp_plan="auto"``, on Gloo; then the same on the ``torch.distributed``
  backend ``pipekernels``.
* ``pipekernels, int8`` and ``int4``: ours, with weights of integers and activations in bfloat16;
  4 bits have groups of 32.
* ``llama.cpp``, ``CTranslate2``: with two threads; with weights of q8_0 or q4_0, and int8.
  CTranslate2 does not compute in bfloat16 on all CPUs.
* ``a read of the weights``: as many bytes as ours have, summed by two threads as float32: the
  memory's speed.
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
from bench.peers.decoders import ctranslate2, llama_cpp
from bench.processes import Serve, join, repeated, started
from bench.report.tables import svg

RANKS = 2
PROMPT, NEW = 32, 128
QUICK_NEW, QUICK_LAYERS = 16, 2
COMMON: dict[str, Any] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
LLAMA = {"intermediate_size": 2048, "num_hidden_layers": 12}
EXPERTS = {
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHAPES = {"Llama": COMMON | LLAMA, "Mixtral": COMMON | EXPERTS, "Llama, 1.1 B": COMMON | LARGE}
CASES = {
    "float32": ("Llama", torch.float32),
    "bfloat16": ("Llama", torch.bfloat16),
    "int8": ("Llama", torch.bfloat16),
    "int4": ("Llama", torch.bfloat16),
    "1.1 B, float32": ("Llama, 1.1 B", torch.float32),
    "1.1 B, bfloat16": ("Llama, 1.1 B", torch.bfloat16),
    "1.1 B, int8": ("Llama, 1.1 B", torch.bfloat16),
    "1.1 B, int4": ("Llama, 1.1 B", torch.bfloat16),
    "experts, float32": ("Mixtral", torch.float32),
    "experts, bfloat16": ("Mixtral", torch.bfloat16),
    "experts, int8": ("Mixtral", torch.bfloat16),
}
PLOTTED = "float32", "bfloat16"
EVERY = (
    *("one thread", "two threads", "two threads, compiled"),
    *("pipekernels", "pipekernels, compiled", "a read of the weights"),
    *("transformers, Gloo", "transformers, backend pipekernels"),
)
CANDIDATES = {
    "float32": (*EVERY, "llama.cpp, f32", "CTranslate2, float32"),
    "bfloat16": (*EVERY, "llama.cpp, bf16"),
    "int8": (
        *("two threads", "pipekernels", "pipekernels, int8", "pipekernels, int8, compiled"),
        *("a read of the weights, int8", "llama.cpp, q8_0", "CTranslate2, int8"),
    ),
    "int4": (
        *("two threads", "pipekernels, int4", "pipekernels, int4, compiled"),
        *("a read of the weights, int4", "llama.cpp, q4_0"),
    ),
    # Few, since all keep their weights in memory.
    "1.1 B, float32": (
        *("a read of the weights", "pipekernels, compiled"),
        *("llama.cpp, f32", "CTranslate2, float32"),
    ),
    "1.1 B, bfloat16": (
        *("two threads", "pipekernels", "pipekernels, compiled"),
        *("a read of the weights", "llama.cpp, bf16"),
    ),
    "1.1 B, int8": (
        *("a read of the weights, int8", "pipekernels, int8, compiled"),
        *("llama.cpp, q8_0", "CTranslate2, int8"),
    ),
    "1.1 B, int4": (
        *("a read of the weights, int4", "pipekernels, int4, compiled"),
        "llama.cpp, q4_0",
    ),
    "experts, float32": ("two threads", "pipekernels"),
    "experts, bfloat16": ("two threads", "pipekernels"),
    "experts, int8": ("two threads", "pipekernels", "pipekernels, int8"),
}
QUICK = {
    "float32": ("one thread", "two threads", "pipekernels"),
    "experts, int8": ("two threads", "pipekernels", "pipekernels, int8"),
}
BASE = "two threads"
CONDITIONS = {
    "model": "Llama, 12 layers of width 768, 12 heads, inner width 2048, 32000 tokens, tied: 110 M "
    "parameters",
    "1.1 B": "Llama, 22 layers of width 2048, 32 heads over 4 key heads, inner width 5632, 32000 "
    "tokens",
    "experts": "Mixtral, 9 layers of width 768, 12 heads, 8 experts of inner width 1536, 2 active, "
    "32000 tokens, tied: 301 M parameters",
    "int8, int4": "activations in bfloat16, as the candidates beside them",
    "work": f"prompt of {PROMPT} tokens, then {NEW} new ones, greedy; seconds per new token",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, candidates in turn, medians over turns",
}


@functools.cache
def saved(name: str, new: int, layers: int) -> Any:
    """A folder, until the end of this process, of a model with random weights in float32, and the
    ``new`` tokens that it generates."""
    import transformers

    folder = tempfile.TemporaryDirectory()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.partition(',')[0]}Config")
    shape = SHAPES[name] | {"num_hidden_layers": layers}
    model = transformers.AutoModelForCausalLM.from_config(config(**shape)).eval()
    model.save_pretrained(folder.name)
    Path(folder.name, "tokens.json").write_text(json.dumps(generate(model, new).tolist()))
    return folder


def generate(model: Any, new: int) -> torch.Tensor:
    """Prompt and new tokens."""
    prompt = torch.randint(3, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id = None  # Every one generates as many.
    options = {"max_new_tokens": new, "do_sample": False}
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


def _reading(
    rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype, bits: float
) -> None:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # In float32.
    torch.set_num_threads(RANKS)
    serve(repeated(torch.ones(int(size // 4 * (bits or 8 * dtype.itemsize) / 32)).sum, 20))


def _bare(
    rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype, n: int, compiled: bool
) -> None:
    from pipekernels.huggingface import compile_decoding

    model = _loaded(folder, dtype)
    if compiled:
        compile_decoding(model, PROMPT + NEW)
    serve_tokens(model, folder, serve, n)


def _pipekernels(
    rank: int,
    port: int,
    serve: Serve,
    folder: Path,
    dtype: torch.dtype,
    bits: int,
    compiled: bool,
) -> None:
    from pipekernels import Communicator
    from pipekernels.huggingface import compile_decoding
    from pipekernels.tensor_parallel import quantize_weights, tensor_parallelize

    join("gloo", rank, RANKS, port)
    with Communicator.from_process_group() as comm:
        model = tensor_parallelize(_loaded(folder, dtype), "auto", comm)
        if bits:
            quantize_weights(model, bits=bits)
        if compiled:
            compile_decoding(model, PROMPT + NEW)
        serve_tokens(model, folder, serve)


def _transformers(
    rank: int, port: int, serve: Serve, folder: Path, dtype: torch.dtype, backend: str
) -> None:
    join(backend, rank, RANKS, port)
    serve_tokens(_loaded(folder, dtype, tp_plan="auto", tp_size=RANKS), folder, serve)


WORKERS: dict[str, tuple[Any, ...]] = {
    "a read of the weights": (1, _reading, 0),
    "a read of the weights, int8": (1, _reading, 8),
    "a read of the weights, int4": (1, _reading, 4.5),  # With a scale of 16 bits for each 32.
    "one thread": (1, _bare, 1, False),
    "two threads": (1, _bare, RANKS, False),
    "two threads, compiled": (1, _bare, RANKS, True),
    "pipekernels": (RANKS, _pipekernels, 0, False),
    "pipekernels, compiled": (RANKS, _pipekernels, 0, True),
    "pipekernels, int8": (RANKS, _pipekernels, 8, False),
    "pipekernels, int8, compiled": (RANKS, _pipekernels, 8, True),
    "pipekernels, int4": (RANKS, _pipekernels, 4, False),
    "pipekernels, int4, compiled": (RANKS, _pipekernels, 4, True),
    **{f"llama.cpp, {kind}": (1, llama_cpp, kind) for kind in ("f32", "bf16", "q8_0", "q4_0")},
    **{f"CTranslate2, {kind}": (1, ctranslate2, kind) for kind in ("float32", "int8")},
    "transformers, Gloo": (RANKS, _transformers, "gloo"),
    "transformers, backend pipekernels": (RANKS, _transformers, "pipekernels"),
}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every candidate."""
    name, dtype = CASES[case]
    layers = SHAPES[name]["num_hidden_layers"]
    size = (QUICK_NEW, QUICK_LAYERS) if options.quick else (NEW, layers)
    folder = Path(saved(name, *size).name)
    return Turns(started(WORKERS, names, folder, dtype), 1, 3)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second: a bar per candidate, an axis per dtype of the Llama, as an SVG file."""
    from matplotlib.patches import Patch

    with svg(path, len(PLOTTED), width=6.5, height=3, share=False) as axes:
        for axis, case in zip(axes, PLOTTED, strict=True):
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
        colours = {"C0": "with pipekernels", "C7": "without"}
        patches = [Patch(color=colour, label=label) for colour, label in colours.items()]
        axes[-1].legend(handles=patches, loc="lower right")
