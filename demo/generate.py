"""Act 2: a Llama in 4 bits, and the GPT of act 1, generate on two ranks as in one process."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from demo import llama, text
from demo.ranks import RANKS, processes
from demo.results import Check, SpeedUp, Spread, rounded
from demo.sizes import Sizes

WHOLE = {
    f"one process, {RANKS} threads, {name}": dtype
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
}
SPLIT = f"{RANKS} ranks, {llama.BITS} bits, compiled"


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
        f"in each process; prompt of {llama.PROMPT} tokens, {sizes.llama_new_tokens} new.\n"
        "The first round waits for the compiler, on a machine that has not compiled this yet"
    )
    speeds: dict[str, list[float]] = {name: [] for name in (*WHOLE, SPLIT)}
    sequences: dict[str, list[tuple[int, ...]]] = {name: [] for name in speeds}
    with ExitStack() as stack:
        turns = {
            name: stack.enter_context(processes(1, llama.prepare_whole, sizes, dtype))
            for name, dtype in WHOLE.items()
        }
        split = processes(RANKS, llama.prepare_integers, sizes, backend="pipekernels")
        turns[SPLIT] = stack.enter_context(split)
        in_turn = list(turns)
        for round_ in tqdm(range(1 + sizes.llama_rounds), "generating", unit="round"):
            for name in in_turn:
                seconds, tokens = zip(*turns[name](), strict=True)
                sequences[name] += tokens
                if round_:  # The first is a warm-up.
                    speeds[name].append(sizes.llama_new_tokens / max(seconds))
            in_turn.append(in_turn.pop(0))
    spreads = {name: Spread.of(samples) for name, samples in speeds.items()}
    for name, spread in spreads.items():
        print(f"{name:>32}: {spread} tokens/s")
    peer = max(WHOLE, key=lambda name: spreads[name].median)
    ratio = spreads[SPLIT].median / spreads[peer].median
    return Generation(
        spreads,
        [SpeedUp("generation with the Llama", peer, ratio)],
        _compare_tokens(sizes, sequences[SPLIT]),
    )


def _compare_tokens(sizes: Sizes, sequences: list[tuple[int, ...]]) -> list[Check]:
    different = sum(sequence != sequences[0] for sequence in sequences)
    with processes(1, llama.prepare_comparison, sizes) as turn:
        ((short, error),) = turn(sequences[0])
    limit = 4 * error  # Twice for the ranks' own errors, twice as the errors are samples.
    return [
        Check(
            f"{different} of {len(sequences)} generations on ranks differ from the first (limit 0)",
            different == 0,
        ),
        Check(
            f"the logits of their tokens are {rounded(short)} below the largest ones of one "
            f"process at most (limit {rounded(limit)}, four rounding errors of a logit)",
            short <= limit,
        ),
    ]


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
