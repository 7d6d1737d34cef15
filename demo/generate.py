"""Act 2: a Llama, and the GPT of act 1, generate on two ranks what one process generates."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from demo import llama, text
from demo.ranks import RANKS, processes
from demo.results import Check, SpeedUp, Spread
from demo.sizes import Sizes

WHOLE, SPLIT = f"one process, {RANKS} threads", f"{RANKS} ranks, 1 thread each"


@dataclass(frozen=True)
class Generation:
    """Results of act 2; ``speeds`` of the Llama in tokens per second, empty without it."""

    speeds: dict[str, Spread]
    speed_ups: list[SpeedUp]
    checks: list[Check]


def run(sizes: Sizes, model: nn.Sequential, output: Path) -> Generation:
    """Generate with both models; write the weights of the small ``model`` into ``model.pt``."""
    print(f"\nAct 2: generation on {RANKS} ranks by tensor_parallelize, on CPUs")
    generation = Generation({}, [], [])
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed (it needs Python 3.11): the Llama is left out")
    else:
        generation = _run_llama(sizes)
    generation.checks.append(_compare_texts(sizes, model, output))
    return generation


def _run_llama(sizes: Sizes) -> Generation:
    print(
        f"building a Llama of {llama.parameters(sizes) / 1e6:.0f} M parameters with random weights "
        f"(float32) in each process; prompt of {llama.PROMPT} tokens, {sizes.llama_new_tokens} new"
    )
    speeds: dict[str, list[float]] = {WHOLE: [], SPLIT: []}
    sequences: list[tuple[int, ...]] = []
    with (
        processes(1, llama.prepare_whole, sizes) as whole,
        processes(RANKS, llama.prepare_split, sizes) as split,
    ):
        in_turn = [(WHOLE, whole), (SPLIT, split)]
        for round_ in tqdm(range(1 + sizes.llama_rounds), "generating", unit="round"):
            for name, turn in in_turn:
                seconds, tokens = zip(*turn(), strict=True)
                sequences += tokens
                if round_:  # The first is a warm-up.
                    speeds[name].append(sizes.llama_new_tokens / max(seconds))
            in_turn.reverse()
    spreads = {name: Spread.of(samples) for name, samples in speeds.items()}
    ratio = spreads[SPLIT].median / spreads[WHOLE].median
    for name, spread in spreads.items():
        print(f"{name:>24}: {spread} tokens/s")
    different = sum(sequence != sequences[0] for sequence in sequences)
    check = Check(
        f"{different} of {len(sequences)} generations on ranks and in one process differ from the "
        f"first of one process (limit 0)",
        different == 0,
    )
    return Generation(spreads, [SpeedUp("generation with the Llama", WHOLE, ratio)], [check])


def _compare_texts(sizes: Sizes, model: nn.Sequential, output: Path) -> Check:
    print("the GPT of act 1 writes in one process, then on the ranks, in float64:")
    weights = output / "model.pt"
    torch.save(model.state_dict(), weights)
    whole = text.generate(text.load(sizes, weights), sizes.text_bytes)
    with processes(RANKS, text.prepare_split, sizes, weights) as turn:
        split = turn()
    print((text.PROMPT + split[0]).decode(errors="replace"))
    equal = split.count(whole)
    return Check(
        f"{equal} of {RANKS} ranks wrote the {sizes.text_bytes} bytes that one process wrote "
        f"(limit {RANKS})",
        equal == RANKS,
    )
