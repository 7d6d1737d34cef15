"""Tokens that sharded models of transformers generate."""

import copy
import itertools
from typing import Any

import pytest
import torch
from support.levels import in_gate
from support.models import DECODERS, KINDS_OF_DECODERS, model_of, run_sharded, tokens
from support.ranks import on_ranks, run_processes
from torch import Tensor

transformers = pytest.importorskip("transformers")

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import tensor_unparallelize

pytestmark = pytest.mark.slow
COUNT: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}
# transformers' batches of the others have no torch attention, or are wrong in one process too.
BATCHED = [name for name in DECODERS if name not in ("Gemma 2", "Bloom")]


@pytest.mark.parametrize(
    ("name", "world_size"),
    in_gate(
        [*((name, 2) for name in KINDS_OF_DECODERS), ("Llama", 4)],
        itertools.product(DECODERS, (2, 4)),
    ),
)
def test_greedy_tokens_are_those_of_one_process(name: str, world_size: int) -> None:
    plain = model_of(name).eval()
    prompt = tokens(2, 5)
    expected = plain.generate(prompt, do_sample=False, **COUNT)
    assert expected.shape == (2, 21)

    def body(model: Any, _: Communicator) -> None:
        assert torch.equal(model.generate(prompt, do_sample=False, **COUNT), expected)
        static = {"cache_implementation": "static"}
        for more in (static, static | {"prefill_chunk_size": 2}):
            assert torch.equal(model.generate(prompt, do_sample=False, **COUNT, **more), expected)

    run_sharded(plain, world_size, body)


def sampled(comm: Communicator, names: list[str]) -> dict[str, list[list[int]]]:
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0, **COUNT}
    found = {}
    for name in names:
        model = tensor_parallelize(model_of(name).eval(), "auto", comm)
        torch.manual_seed(7)
        found[name] = model.generate(tokens(2, 5), **options).tolist()
        torch.manual_seed(7)
        static = model.generate(tokens(2, 5), cache_implementation="static", **options)
        assert static.tolist() == found[name], name
        torch.manual_seed(7 + comm.rank)  # Rank 0's counts.
        assert model.generate(tokens(2, 5), **options).tolist() == found[name], name
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "names"),
    in_gate(
        [(2, ["Llama", "GPT-2"])],
        [(2, ["Llama", "GPT-2"]), (2, list(DECODERS)), (4, list(DECODERS))],
    ),
    ids=["some models-2", "all models-2", "all models-4"],
)
def test_sampled_tokens_are_the_same_on_all_ranks(world_size: int, names: list[str]) -> None:
    first, *others = run_processes(world_size, sampled, names)
    assert all(other == first for other in others)
    for name, rows in first.items():
        assert [len(row) for row in rows] == [21, 21] and rows[0] != rows[1], name


@pytest.mark.parametrize("stop", [{"max_time": 0.05}, {"stopping_criteria": None}], ids=str)
@on_ranks(2)
def test_ranks_stop_where_rank_0_does(comm: Communicator, stop: dict[str, Any]) -> None:
    late = [lambda ids, _, **__: torch.full((2,), ids.shape[1] > 6 + 4 * comm.rank)]
    if "max_time" not in stop:
        stop = {"stopping_criteria": late}
    model = tensor_parallelize(model_of("Llama").eval(), "auto", comm)
    for _ in range(5):
        found = model.generate(tokens(2, 5), max_new_tokens=300, eos_token_id=None, **stop)
        lengths = comm.all_gather(torch.tensor([found.shape[1]])).tolist()
        assert lengths[0] == lengths[1] < 305
    if "max_time" not in stop:
        assert lengths == [7, 7]


def test_ranks_that_would_disagree_are_told_before() -> None:
    def body(model: Any, _: Communicator) -> None:
        prompt = tokens(2, 5)
        with pytest.raises(RuntimeError, match="ranks are threads that share a random number"):
            model.generate(prompt, max_new_tokens=4, do_sample=True)
        with pytest.raises(ValueError, match="needs one process per rank"):
            model.generate_batch([[1, 2, 3]])
        found: Tensor = model.generate(prompt, max_new_tokens=4)
        tensor_unparallelize(model)
        assert "generate" not in vars(model)
        assert torch.equal(model.generate(prompt, max_new_tokens=4), found)

    run_sharded(model_of("Llama").eval(), 2, body)


def batched(comm: Communicator, names: list[str]) -> None:
    prompts = [tokens(1, n)[0].tolist() for n in (5, 9, 3)]
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
    options = transformers.ContinuousBatchingConfig(num_blocks=4, page_size=16, max_batch_tokens=64)
    for name in names:
        model = model_of(name).float().eval()
        model.set_attn_implementation("sdpa")
        model.generation_config.eos_token_id = None
        count = {"max_new_tokens": 8, "do_sample": False}
        rows = [model.generate(torch.tensor([row]), **count)[0].tolist() for row in prompts]
        tensor_parallelize(model, "auto", comm)
        found = copy.deepcopy(model).generate_batch(prompts, greedy, options, max_new_tokens=8)
        answers = {tuple(answer.prompt_ids): answer.generated_tokens for answer in found.values()}
        expected = {tuple(row[:-8]): row[-8:] for row in rows}
        assert answers == expected, name
        share = model.init_continuous_batching().continuous_batching_config.max_memory_percent
        assert 0 < share <= 0.6 / comm.world_size
        assert model._device_mesh is None  # Else others would take it for one with DTensors.


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "names"),
    in_gate(
        [(3, ["Llama", "GPT-2"])],  # 4 heads over 2 of keys: uneven, one of keys held twice.
        [(3, ["Llama", "GPT-2"]), (2, BATCHED), (3, BATCHED), (4, BATCHED)],
    ),
    ids=["some models-3", "all models-2", "all models-3", "all models-4"],
)
def test_tokens_of_a_batch_are_those_of_generate(world_size: int, names: list[str]) -> None:
    run_processes(world_size, batched, names)
