"""Generating with Llamas, and with a mixture of experts, on two CPU ranks, against one process,
transformers and llama.cpp.

The Llamas have 110 M, 1.1 B and 3.2 B parameters, the mixture 301 M in 8 experts, of which 2 are
active; in the quick form they have 2 layers. Weights are random. Every system generates greedily,
with a KV cache, the same number of tokens; in float32 these are checked against those of one
process. A part of the table is the time of a new token, after a prompt of 64, of one sequence or of
each of 8 together; or the time from the prompt to the first token.

* ``two threads``: the bare model in one process.
* ``pipekernels``: ``tensor_parallelize(model, "auto", comm)`` on two processes of one thread each,
  as transformers' below.
* ``compiled``: the two above after ``compile_decoding(model)``.
* ``transformers``: its own ``tp_plan="auto"``, on Gloo; then the same on the ``torch.distributed``
  backend ``pipekernels``.
* ``pipekernels, int8`` and ``int4``: ours, with weights of integers, rounded while they are loaded;
  activations in bfloat16; 4 bits have groups of 32.
* ``llama.cpp``, ``OpenVINO``, ``CTranslate2``: with two threads; with weights of q8_0 or q4_0, of
  int8 or int4, and of int8. CTranslate2 does not compute in bfloat16 on all CPUs.
* ``a read of the weights``: as many bytes as ours have, summed by two threads as float32: the
  memory's speed.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import Options, Plan, Row, alternate, summary
from bench.peers import decoders
from bench.peers.decoders import CHECKED, WORKS, Generated, serve
from bench.processes import Processes, Serve, join, repeated, started
from bench.report import tables

RANKS = 2
LENGTH = max(work.prompt + work.new for work in WORKS.values())
QUICK_LAYERS = 2
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
LARGEST = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SHAPES = {
    "Llama": COMMON | LLAMA,
    "Mixtral": COMMON | EXPERTS,
    "Llama, 1.1 B": COMMON | LARGE,
    "Llama, 3.2 B": COMMON | LARGEST,
}
CASES = {
    "float32": ("Llama", torch.float32),
    "bfloat16": ("Llama", torch.bfloat16),
    "int8": ("Llama", torch.bfloat16),
    "int4": ("Llama", torch.bfloat16),
    "1.1 B, bfloat16": ("Llama, 1.1 B", torch.bfloat16),
    "1.1 B, int8": ("Llama, 1.1 B", torch.bfloat16),
    "1.1 B, int4": ("Llama, 1.1 B", torch.bfloat16),
    "3.2 B, int8": ("Llama, 3.2 B", torch.bfloat16),
    "3.2 B, int4": ("Llama, 3.2 B", torch.bfloat16),
    "experts, bfloat16": ("Mixtral", torch.bfloat16),
    "experts, int8": ("Mixtral", torch.bfloat16),
}
BOTH = "pipekernels", "pipekernels, compiled"
BARE = "two threads", "two threads, compiled"
READ = "a read of the weights"
CANDIDATES = {
    "float32": (*BARE, *BOTH, READ, "llama.cpp, f32", "CTranslate2, float32"),
    "bfloat16": (
        *(*BARE, *BOTH, READ, "llama.cpp, bf16"),
        *("transformers, Gloo", "transformers, backend pipekernels"),
    ),
    "experts, bfloat16": (BARE[0], "pipekernels"),
    "experts, int8": (BARE[0], "pipekernels, int8"),
    "1.1 B, bfloat16": (BARE[0], *BOTH, READ, "llama.cpp, bf16"),
}
for size in ("", "1.1 B, ", "3.2 B, "):
    for bits, kind in (("int8", "q8_0"), ("int4", "q4_0")):
        CANDIDATES[f"{size}{bits}"] = (
            *(f"pipekernels, {bits}, compiled", f"{READ}, {bits}"),
            *(f"llama.cpp, {kind}", f"OpenVINO, {bits}"),
            *(("CTranslate2, int8",) if bits == "int8" and size != "3.2 B, " else ()),
        )
QUICK = {
    "float32": ("two threads", "pipekernels"),
    "experts, int8": ("two threads", "pipekernels, int8"),
}
BASE = ("llama.cpp", "two threads")
CONDITIONS = {
    "model": "Llama, 12 layers of width 768, 12 heads, inner width 2048, 32000 tokens, tied: 110 M "
    "parameters",
    "1.1 B": "Llama, 22 layers of width 2048, 32 heads over 4 key heads, inner width 5632, 32000 "
    "tokens",
    "3.2 B": "Llama, 28 layers of width 3072, 24 heads over 8 key heads, inner width 8192, 128256 "
    "tokens, tied",
    "experts": "Mixtral, 9 layers of width 768, 12 heads, 8 experts of inner width 1536, 2 active, "
    "32000 tokens, tied: 301 M parameters",
    "int8, int4": "activations in bfloat16, as the candidates beside them",
    "work": f"greedy; a token: mean of {CHECKED.new - 1}; of 8 sequences: of "
    f"{WORKS['a token of each of 8 sequences'].new - 1}",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, candidates in turn, medians over turns",
}


@functools.cache
def saved(name: str, layers: int, exact: bool) -> Any:
    """A folder, until the end of this process, of a model with random weights, and, if it is
    ``exact``, with weights in float32 and the tokens that it generates; else in bfloat16."""
    import transformers

    folder = tempfile.TemporaryDirectory()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.partition(',')[0]}Config")
    shape = SHAPES[name] | {"num_hidden_layers": layers}
    dtype = torch.float32 if exact else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config(**shape), dtype=dtype).eval()
    model.save_pretrained(folder.name, max_shard_size="100GB")
    if exact:
        tokens = generated(model, CHECKED.prompts(), CHECKED.new)[2]
        Path(folder.name, "tokens.json").write_text(json.dumps(tokens))
    return folder


def generated(model: Any, prompts: list[list[int]], new: int) -> Generated:
    """By ``generate`` of transformers."""
    times = []

    def told(ids: Any, scores: Any, **_: Any) -> torch.Tensor:
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    model.generation_config.eos_token_id = None  # Every one generates as many.
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": new, "do_sample": False, "stopping_criteria": [told]}
    begin = time.perf_counter()
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    token = (times[-1] - times[0]) / max(new - 1, 1)
    return times[0] - begin, token, found[:, ids.shape[1] :].tolist()


def _serve(model: Any, folder: Path, to: Serve, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    model = model.eval()
    exact = model.dtype == torch.float32
    serve(functools.partial(generated, model), to, folder, exact=exact)


def _loaded(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    _quiet()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def _reading(
    rank: int, port: int, to: Serve, folder: Path, dtype: torch.dtype, bits: float
) -> None:
    size = (folder / "model.safetensors").stat().st_size
    count = size // (4 if (folder / "tokens.json").exists() else 2)  # Weights.
    torch.set_num_threads(RANKS)
    turn = repeated(torch.ones(int(count * (bits or 8 * dtype.itemsize) / 32)).sum, 20)
    to(lambda name: turn() if name == "a token" else 0.0)


def _bare(
    rank: int, port: int, to: Serve, folder: Path, dtype: torch.dtype, compiled: bool
) -> None:
    from pipekernels.huggingface import compile_decoding

    model = _loaded(folder, dtype)
    if compiled:
        compile_decoding(model, LENGTH)
    _serve(model, folder, to, RANKS)


def _pipekernels(
    rank: int, port: int, to: Serve, folder: Path, dtype: torch.dtype, bits: int, compiled: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipekernels import Communicator
    from pipekernels.huggingface import compile_decoding
    from pipekernels.tensor_parallel import load_pretrained, tensor_parallelize

    _quiet()
    join("gloo", rank, RANKS, port)
    with Communicator.from_process_group() as comm:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        load_pretrained(tensor_parallelize(model, "auto", comm), folder, bits=bits or None)
        if compiled:
            compile_decoding(model, LENGTH)
        _serve(model, folder, to)


def _transformers(
    rank: int, port: int, to: Serve, folder: Path, dtype: torch.dtype, backend: str
) -> None:
    join(backend, rank, RANKS, port)
    _serve(_loaded(folder, dtype, tp_plan="auto", tp_size=RANKS), folder, to)


WORKERS: dict[str, tuple[Any, ...]] = {
    READ: (1, _reading, 0),
    f"{READ}, int8": (1, _reading, 8),
    f"{READ}, int4": (1, _reading, 4.5),  # With a scale of 16 bits for each 32.
    "two threads": (1, _bare, False),
    "two threads, compiled": (1, _bare, True),
    "pipekernels": (RANKS, _pipekernels, 0, False),
    "pipekernels, compiled": (RANKS, _pipekernels, 0, True),
    "pipekernels, int8": (RANKS, _pipekernels, 8, False),
    "pipekernels, int8, compiled": (RANKS, _pipekernels, 8, True),
    "pipekernels, int4": (RANKS, _pipekernels, 4, False),
    "pipekernels, int4, compiled": (RANKS, _pipekernels, 4, True),
    **{f"llama.cpp, {k}": (1, decoders.llama_cpp, k) for k in ("f32", "bf16", "q8_0", "q4_0")},
    **{f"CTranslate2, {k}": (1, decoders.ctranslate2, k) for k in ("float32", "int8")},
    **{f"OpenVINO, {k}": (1, decoders.openvino, k) for k in ("int8", "int4")},
    "transformers, Gloo": (RANKS, _transformers, "gloo"),
    "transformers, backend pipekernels": (RANKS, _transformers, "pipekernels"),
}


def measure(plan: Plan, options: Options) -> Iterator[list[Row]]:
    """The rows of each case: a process of every candidate serves all parts."""
    for case, names in plan.items():
        name, dtype = CASES[case]
        layers = QUICK_LAYERS if options.quick else SHAPES[name]["num_hidden_layers"]
        folder = Path(saved(name, layers, name != "Llama, 3.2 B").name)
        runners = started(WORKERS, names, folder, dtype)
        try:
            yield [row for part in WORKS for row in _rows(case, part, runners)]
        finally:
            for runner in runners.values():
                runner.close()


def _rows(case: str, part: str, runners: dict[str, Processes]) -> list[Row]:
    timed = {
        name: functools.partial(runner, part)
        for name, runner in runners.items()
        if part == "a token" or not name.startswith(READ)
    }
    return [
        {"part": part, "case": case, "candidate": name, **summary(found)}
        for name, found in alternate(timed, warmup=1, rounds=3).items()
    ]


def table(rows: Sequence[Row], others: Sequence[Sequence[Row]] = ()) -> str:
    """A column per system, as a case has the format of its weights; integers, then floats."""
    cases = sorted(CASES, key=lambda case: "int" not in case)
    found = [[_of_system(row) for row in each] for each in (rows, *others)]
    found[0].sort(key=lambda row: cases.index(row["case"]))
    return tables.table(found[0], found[1:], BASE)


def _of_system(row: Row) -> Row:
    kind = "integers" if "int" in row["case"] else "floats"
    system = re.sub(r", \w*\d+(_0)?\b", "", row["candidate"])
    return row | {"part": f"{row['part']}, weights of {kind}", "candidate": system}
