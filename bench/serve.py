"""Many requests at once to servers of OpenAI's API, on two cores.

Prompts of 128 random tokens, 64 new ones each, streamed to the client ``openai``.

``transformers``: its own server with continuous batching, one process of two threads;
``pipekernels``: on two ranks; ``llama.cpp``: its server (``xllamacpp``), a slot for each request.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import torch

from bench import decode
from bench.harness import Options, Turns
from bench.peers.decoders import write_gguf

PROMPT, NEW, AT_ONCE = 128, 64, (1, 4, 16, 32)
KINDS = {
    "bfloat16": ("transformers", "pipekernels", "llama.cpp, bf16"),
    "int8": ("transformers", "pipekernels, int8", "llama.cpp, q8_0"),
}
CANDIDATES = {f"{k}, {n} at once": KINDS[k][: 2 + (n < 32)] for k in KINDS for n in AT_ONCE}
ROUNDS = {1: 3, 4: 2, 16: 1, 32: 1}
# torch multiplies matrices of bfloat16 five times slower than float32 where CPUs cannot.
THEIRS = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
QUICK = {"bfloat16, 4 at once": ("transformers", "pipekernels")}
BASE = "transformers"
COLUMNS = ("first, ms", "first p95", "between, ms", "between p95")
CONDITIONS = {
    "model": decode.CONDITIONS["1.1 B"] + f"; transformers' server has it in {THEIRS}",
    "work": f"prompts of {PROMPT} tokens, {NEW} new ones; seconds per new token of all requests; "
    f"rounds, by requests at once: {ROUNDS}",
}
SLOTS = """import sys, time, xllamacpp
params, slots = xllamacpp.CommonParams(), int(sys.argv[3])
params.model.path, params.port, params.n_parallel = sys.argv[1], int(sys.argv[2]), slots
params.n_ctx, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 256 * slots, 2, 2
server = xllamacpp.Server(params); time.sleep(1e6)"""


def saved(layers: int) -> Any:
    """The folder of the model, with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    folder = decode.saved("Llama, 1.1 B", layers, False)
    words = {f"t{i}": i for i in range(decode.COMMON["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder.name)
    GenerationConfig(eos_token_id=-1, pad_token_id=0).save_pretrained(folder.name)
    return folder


class Served:
    """A server; a turn is requests at once, and gives seconds per new token."""

    def __init__(self, name: str, folder: Path, at_once: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self.system, _, kind = name.partition(", ")
        common = f"serve {folder} --port={port}"
        theirs = f"-m transformers.cli.transformers {common} --device=cpu --continuous-batching"
        command = f"-m pipekernels {common} --dtype=bfloat16 --ranks=2 --cache-tokens=8192".split()
        if self.system == "llama.cpp":
            file = tempfile.mkdtemp() + "/model.gguf"
            write_gguf(folder, Path(file), kind)
            command = ["-c", SLOTS, file, port, str(at_once)]
        elif self.system == BASE:
            command = f"{theirs} --dtype={THEIRS} --cb-num-blocks=32".split()
        elif kind:
            command += ["--bits=8"]
        threads = os.environ | {"OMP_NUM_THREADS": "1" if self.system == "pipekernels" else "2"}
        self.process = subprocess.Popen([sys.executable, *command], env=threads)
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=50
        )
        self.model, self.at_once = str(folder), at_once
        self.close = self.process.terminate
        while socket.socket().connect_ex(("127.0.0.1", int(port))):
            assert self.process.poll() is None, f"the server {name!r} has not started"
            time.sleep(0.2)
        self.firsts, self.gaps = list[float](), list[float]()
        self._ask(4)
        self.firsts, self.gaps = [], []

    def __call__(self) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(self.at_once) as pool:
            list(pool.map(self._ask, [NEW] * self.at_once))
        return (time.perf_counter() - begin) / self.at_once / NEW

    def _ask(self, new: int) -> None:
        tokens = random.sample(range(3, decode.COMMON["vocab_size"]), PROMPT)
        given: dict[str, Any] = {"prompt": " ".join(f"t{token}" for token in tokens)}
        if self.system == "llama.cpp":  # Its file has no words.
            given = {"prompt": tokens, "extra_body": {"ignore_eos": True}}
        given |= {"model": self.model, "max_tokens": new, "temperature": 0}
        times = [time.perf_counter()]
        for piece in self.client.completions.create(**given, stream=True):
            times += [time.perf_counter()] * bool(piece.choices and piece.choices[0].text)
        self.firsts.append(times[1] - times[0])
        self.gaps += [b - a for a, b in itertools.pairwise(times[1:])]

    def columns(self) -> dict[str, int]:
        """Medians and 95th percentiles, in milliseconds."""
        cuts = [statistics.quantiles(times, n=20) for times in (self.firsts, self.gaps)]
        found = (round(1e3 * cut[place]) for cut in cuts for place in (9, -1))
        return dict(zip(COLUMNS, found, strict=True))


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Servers that are installed."""
    layers = decode.QUICK_LAYERS if options.quick else decode.LARGE["num_hidden_layers"]
    folder, at_once = Path(saved(layers).name), int(case.split()[-3])
    has = [x for x in names if "llama" not in x or importlib.util.find_spec("xllamacpp")]
    servers = {name: Served(name, folder, at_once) for name in has}
    columns = lambda _: {name: server.columns() for name, server in servers.items()}
    return Turns(servers, 0, ROUNDS[at_once], columns)
