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
    """What act 2 has found; ``speeds`` of the Llama in tokens per second, empty without it."""

    speeds: dict[str, Spread]
    speed_ups: list[SpeedUp]
    checks: list[Check]


def run(sizes: Sizes, model: nn.Sequential, output: Path) -> Generation:
    """Generate with both models; write the weights of the small ``model`` into ``model.pt``."""
    print(f"\nAct 2: generation on {RANKS} ranks by tensor_parallelize, on CPUs, float32")
    found = Generation({}, [], [])
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed (it needs Python 3.11): the Llama is left out")
    else:
        found = _run_llama(sizes)
    found.checks.append(_compare_texts(sizes, model, output))
    for check in found.checks:
        print(check)
    return found


def _run_llama(sizes: Sizes) -> Generation:
    print(
        f"building a Llama of {llama.parameters(sizes) / 1e6:.0f} M parameters with random weights "
        f"in each process; prompt of {llama.PROMPT} tokens, {sizes.llama_new_tokens} new"
    )
    speeds: dict[str, list[float]] = {WHOLE: [], SPLIT: []}
    sequences = set()
    with (
        processes(1, llama.prepare_whole, sizes) as whole,
        processes(RANKS, llama.prepare_split, sizes) as split,
    ):
        in_turn = [(WHOLE, whole), (SPLIT, split)]
        for round_ in tqdm(range(1 + sizes.llama_rounds), "generating", unit="round"):
            for name, turn in in_turn:
                seconds, tokens = zip(*turn(), strict=True)
                sequences.update(tokens)
                if round_:  # The first is a warm-up.
                    speeds[name].append(sizes.llama_new_tokens / max(seconds))
            in_turn.reverse()
    spreads = {name: Spread.of(found) for name, found in speeds.items()}
    ratio = spreads[SPLIT].median / spreads[WHOLE].median
    for name, spread in spreads.items():
        print(f"{name:>24}: {spread} tokens/s")
    check = Check(
        f"one process and {RANKS} ranks generated {len(sequences)} different sequences of "
        f"{sizes.llama_new_tokens} tokens (limit 1)",
        len(sequences) == 1,
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
    equal = sum(found == whole for found in split)
    return Check(
        f"{equal} of {RANKS} ranks wrote the {sizes.text_bytes} bytes that one process wrote "
        f"(limit {RANKS})",
        equal == RANKS,
    )
