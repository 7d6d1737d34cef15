"""On what the bits of torch's results on a CPU may not depend.

``support.bit_questions`` has more questions, and prints what holds on a machine.
"""

from __future__ import annotations

import random

import pytest
import torch
from support import bit_questions
from support.bit_questions import QUESTIONS
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.weekly]

# Sharded layers compute parts of what the full layers do, with the same bits if these hold.
SAME_BITS = [
    "product: called again",
    "product: addresses moved by multiples of 16 bytes",
    "product: x and W slabs of multiples of 64 bytes, read in place",
    "product: several at once, on threads that have called set_num_threads",
    "product: out= given",
    "product: linear or mm",
    "AdamW, foreach: some elements of a parameter",
    "division: position, number and address of elements",
    "sqrt: position, number and address of elements",
    "softmax: other rows, address, threads 1 or 2",
    "rms_norm: other rows, address, threads 1 or 2",
    "layer_norm: other rows, address, threads 1 or 2",
    "embedding gradient: some columns, threads 1 or 2",
    "embedding gradient: some rows, others masked out",
]


@pytest.mark.parametrize("dtype", bit_questions.DTYPES)
@pytest.mark.parametrize("question", SAME_BITS)
def test_bits_do_not_depend_on(question: str, dtype: torch.dtype, one_thread: None) -> None:
    answer = bit_questions.ask(question, dtype, 40, seconds=5)
    assert answer.differ == 0, answer.example


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_compares_results_of_one_meaning(question: str, one_thread: None) -> None:
    rng = random.Random(0)
    for _ in range(3):
        description, a, b = QUESTIONS[question](rng, torch.float64)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=description)


def test_a_difference_of_one_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(rng: random.Random, dtype: torch.dtype) -> tuple[str, Tensor, Tensor]:
        size = rng.randint(1, 5)
        x = torch.ones(size, dtype=dtype)
        y = x.clone()
        y.view(torch.int32)[-1] += size % 2
        return str(size), x, y

    monkeypatch.setitem(QUESTIONS, "odd sizes", ask)
    answer = bit_questions.ask("odd sizes", torch.float32, 50)
    assert answer.cases == 50 and 0 < answer.differ < 50 and answer.example == "1"
    zero = torch.zeros(2)
    assert not bit_questions.same_bits(zero, -zero)
    assert bit_questions.same_bits(zero / zero, zero / zero)
