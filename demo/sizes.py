"""How much the demo does: in full, or as little as a test needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models, and numbers of steps, tokens and calls."""

    # Act 1: the byte-level GPT.
    width: int = 256
    context: int = 64
    batch: int = 32
    steps_of_a_round: int = 4
    compared_rounds: int = 4
    further_steps: int = 20
    # Act 2: the Llama, and the text of the GPT.
    llama_width: int = 768
    llama_layers: int = 12
    llama_vocabulary: int = 32000
    llama_new_tokens: int = 32
    llama_rounds: int = 5
    text_bytes: int = 200
    # Act 3.
    all_reduce_bytes: tuple[int, ...] = tuple(1 << bits for bits in range(10, 25, 2))
    all_reduce_rounds: int = 4

    @property
    def most_steps(self) -> int:
        """Batches of act 1, with the one of the step whose memory is measured."""
        return self.steps_of_a_round * (1 + self.compared_rounds) + 1 + self.further_steps


FULL = Sizes()
QUICK = Sizes(
    width=32,
    context=16,
    steps_of_a_round=2,
    compared_rounds=1,
    further_steps=1,
    llama_width=192,
    llama_layers=2,
    llama_vocabulary=500,
    llama_new_tokens=4,
    llama_rounds=2,
    text_bytes=8,
    all_reduce_bytes=(1 << 10, 1 << 16),
    all_reduce_rounds=1,
)
