"""Generation for eight prompts with a Llama in two stages on two CPU cores.

The model has 110 M parameters, in the quick form 37 M. Greedy ``generate`` of transformers with KV
caches.

* ``in turn``: one micro-batch after the other, and so one stage after the other, on one thread.
* ``whole batch, one thread``, ``whole batch, two threads``: the bare model and all prompts at once.
* ``pipelined, 2``, ``pipelined, 4``: ``generate_pipelined`` with as many micro-batches, two stages
  of one thread each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.decode import QUICK_LAYERS, SHAPES
from bench.harness import Options, Turns
from bench.processes import Processes, Serve, repeated

PROMPTS, LENGTH, NEW = 8, 32, 32
QUICK_NEW = 4
CASES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CANDIDATES = dict.fromkeys(
    CASES,
    (
        *("in turn", "whole batch, one thread", "whole batch, two threads"),
        *("pipelined, 2", "pipelined, 4"),
    ),
)
QUICK = {"float32": ("in turn", "whole batch, two threads", "pipelined, 2")}
BASE = "whole batch, two threads"
CONDITIONS = {
    "model": "Llama, 12 layers of width 768, 12 heads, inner width 2048, 32000 tokens, tied: 110 M "
    "parameters; the second stage begins at the seventh layer",
    "work": f"{PROMPTS} prompts of {LENGTH} tokens, then {NEW} new ones each, greedy; seconds per "
    "new token of all prompts",
    "timing": "processes in turn, medians over turns",
}


def _worker(
    rank: int, port: int, serve: Serve, dtype: torch.dtype, way: str, new: int, layers: int
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from pipekernels import generate_pipelined

    torch.manual_seed(0)
    shape = SHAPES["Llama"] | {"num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape)).to(dtype).eval()
    middle = [f"model.layers.{layers // 2}"]
    prompts = torch.randint(3, 32000, (PROMPTS, LENGTH))
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    kind, _, number = way.partition(", ")

    def generate() -> torch.Tensor:
        if kind == "pipelined":
            mask = torch.ones_like(prompts)
            return generate_pipelined(
                model, prompts, middle, chunks=int(number), attention_mask=mask, **options
            )
        parts = prompts.chunk(2) if kind == "in turn" else [prompts]
        found = [model.generate(p, attention_mask=torch.ones_like(p), **options) for p in parts]
        return torch.cat(found)

    torch.set_num_threads(1 if kind == "in turn" or number == "one thread" else 2)
    found = generate()
    assert found.shape == (PROMPTS, LENGTH + new)
    if dtype == torch.float32:
        assert torch.equal(found[0], model.generate(prompts[:1], **options)[0])
    turn = repeated(generate, 1, warmup=0)
    serve(lambda: turn() / (PROMPTS * new))


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every way."""
    layers = SHAPES["Llama"]["num_hidden_layers"]
    work = (QUICK_NEW, QUICK_LAYERS) if options.quick else (NEW, layers)
    runners = {way: Processes(1, _worker, CASES[case], way, *work) for way in names}
    return Turns(runners, 1, 3 if options.quick else 5)
