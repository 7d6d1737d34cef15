"""Text generation with the stages of a model busy on different sequences."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.models import model_of, tokens
from torch import Tensor, nn

from pipekernels import (
    Communicator,
    generate_pipelined,
    parallelize_pipeline,
    tensor_parallelize,
    unparallelize_pipeline,
)

pytestmark = pytest.mark.slow
LAYERS = {"Llama": "model.layers", "Qwen3": "model.layers", "GPT-2": "transformer.h"}


def prompts(count: int) -> tuple[Tensor, Tensor]:
    """Padded on the left, all of another length."""
    ids, mask = tokens(count, 9), torch.ones(count, 9, dtype=torch.int64)
    for row in range(1, count):
        ids[row, :row], mask[row, :row] = 0, 0
    return ids, mask


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("name", LAYERS)
def test_tokens_are_those_of_the_whole_model(name: str, cache: dict[str, str]) -> None:
    model = model_of(name).eval()
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    second = f"{LAYERS[name]}.1"
    for count, chunks, stages in [(1, 2, [second]), (5, 2, [second]), (8, 4, [second, "lm_head"])]:
        ids, mask = prompts(count)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, **cache}
        expected = model.generate(ids, attention_mask=mask, **options)
        # A token that some sequences reach early ends these.
        end = int(expected[count // 2, 12])
        ended = model.generate(ids, attention_mask=mask, eos_token_id=end, **options)
        vars(model).pop("_cache", None)
        before[""] = dict(vars(model))
        for more, wanted in (({}, expected), ({"eos_token_id": end}, ended)):
            found = generate_pipelined(
                model, ids, stages, chunks=chunks, attention_mask=mask, **options, **more
            )
            assert torch.equal(found, wanted)
        for key, module in model.named_modules():
            assert vars(module) == before[key], key
    assert not [t for t in threading.enumerate() if t.name.startswith("micro-batch")]


def test_a_model_with_a_device_map() -> None:
    model = model_of("Llama").eval()
    ids, mask = prompts(4)
    options: Any = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    expected = model.generate(ids, **options)
    parallelize_pipeline(model, {"": "cpu", "model.layers.1": "cpu"})
    found = generate_pipelined(model, ids, ["model.layers.1"], chunks=2, **options)
    assert torch.equal(found, expected)
    unparallelize_pipeline(model)


def test_stages_run_at_the_same_time_and_each_runs_one_micro_batch() -> None:
    model = model_of("Llama").eval()
    spans: list[tuple[int, float, float]] = []

    def slow(stage: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        time.sleep(0.02)
        result = forward(*args, **kwargs)
        spans.append((stage, begin, time.perf_counter()))
        return result

    for stage, layer in enumerate(model.get_submodule("model.layers")):
        layer.forward = partial(slow, stage, layer.forward)
    ids, _ = prompts(4)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    generate_pipelined(model, ids, ["model.layers.1"], chunks=2, **options)
    assert len(spans) == 2 * 8 * 2

    def overlaps(a: tuple[int, float, float], b: tuple[int, float, float]) -> bool:
        return a[1] < b[2] and b[1] < a[2]

    pairs = [(a, b) for i, a in enumerate(spans) for b in spans[:i] if overlaps(a, b)]
    assert all(a[0] != b[0] for a, b in pairs)
    assert len(pairs) >= 8


def test_errors_reach_the_caller() -> None:
    model = model_of("Llama").eval()
    ids, mask = prompts(4)

    def fails(module: nn.Module, args: Any) -> None:
        raise OSError("no weights")

    handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fails)
    with pytest.raises(OSError, match="no weights"):
        generate_pipelined(model, ids, ["model.layers.1"], chunks=3, do_sample=False)
    handle.remove()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"stages": ["model.layers.7"]}, ValueError, "has no module 'model.layers.7'"),
        ({"chunks": 0}, ValueError, "chunks is 0; it must be"),
        ({"attention_mask": mask[:, 1:]}, ValueError, r"one shape.*\(4, 9\) and \(4, 8\)"),
        ({"do_sample": True}, ValueError, "do_sample=True would draw"),
        ({"return_dict_in_generate": True}, ValueError, "is not supported"),
        ({"stages": ["lm_head", "model.layers.1"]}, RuntimeError, "stage 2 began after stage 0"),
        ({"stages": ["model.layers.1", "model"]}, RuntimeError, "stage 2 began after stage 0"),
    ]
    for change, error, message in cases:
        arguments: dict[str, Any] = {"stages": ["model.layers.1"], "chunks": 2, **change}
        with pytest.raises(error, match=message):
            generate_pipelined(model, ids, max_new_tokens=2, **arguments)
    [comm] = Communicator.threads(1)
    tensor_parallelize(model, "auto", comm)
    with pytest.raises(ValueError, match="has layers over several ranks"):
        generate_pipelined(model, ids, ["model.layers.1"], chunks=2)
    comm.close()
