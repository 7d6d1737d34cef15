"""Tokens that sharded models of transformers generate."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import DECODERS, model_of, tokens
from support.ranks import run_processes, run_threads
from torch import Tensor

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import tensor_unparallelize

pytestmark = pytest.mark.slow
COUNT = {"max_new_tokens": 64, "min_new_tokens": 64}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_those_of_one_process(name: str, world_size: int) -> None:
    plain = model_of(name).eval()
    copies = [copy.deepcopy(plain) for _ in range(world_size)]
    prompt = tokens(2, 5)
    expected = plain.generate(prompt, do_sample=False, **COUNT)
    assert expected.shape == (2, 69)

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        assert torch.equal(model.generate(prompt, do_sample=False, **COUNT), expected)
        static = {"cache_implementation": "static"}
        assert torch.equal(model.generate(prompt, do_sample=False, **COUNT, **static), expected)

    run_threads(world_size, body)


def sampled(comm: Communicator, name: str) -> list[list[int]]:
    model = tensor_parallelize(model_of(name).eval(), "auto", comm)
    torch.manual_seed(7)
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    found: list[list[int]] = model.generate(tokens(2, 5), **COUNT, **options).tolist()
    if name == "Llama":
        torch.manual_seed(comm.rank)
        with pytest.raises(RuntimeError, match=r"random number generators of ranks \[1\] are in"):
            model.generate(tokens(2, 5), **COUNT, **options)
        model.generate(tokens(2, 5), max_new_tokens=1, do_sample=False)  # Draws none.
    return found


@pytest.mark.processes
@pytest.mark.parametrize("name", DECODERS)
def test_sampled_tokens_are_the_same_on_all_ranks(name: str) -> None:
    first, second = run_processes(2, sampled, name)
    assert first == second
    assert all(len(row) == 69 for row in first)
    assert first[0] != first[1]


def test_ranks_that_would_disagree_are_told_before() -> None:
    copies = [model_of("Llama").eval() for _ in range(2)]

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copies[comm.rank], "auto", comm)
        prompt = tokens(2, 5)
        with pytest.raises(ValueError, match=r"other inputs on ranks \[1\]"):
            model.generate(prompt[comm.rank][None], max_new_tokens=4)
        with pytest.raises(ValueError, match=r"other inputs on ranks \[1\]"):
            model.generate(prompt, max_new_tokens=4 + comm.rank)
        with pytest.raises(RuntimeError, match="ranks are threads that share a random number"):
            model.generate(prompt, max_new_tokens=4, do_sample=True)
        found: Tensor = model.generate(prompt, max_new_tokens=4)
        tensor_unparallelize(model)
        assert "generate" not in vars(model)
        assert torch.equal(model.generate(prompt, max_new_tokens=4), found)

    run_threads(2, body)
