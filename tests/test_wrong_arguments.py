"""Arguments of wrong types and values are refused by name, not by what they break."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipekernels import (
    Communicator,
    Pipe,
    generate_pipelined,
    parallelize_module,
    parallelize_pipeline,
    plan_pipeline,
    skip,
    tensor_parallelize,
    unparallelize_pipeline,
)
from pipekernels.batchnorm import convert_deferred_batch_norm
from pipekernels.tensor_parallel import (
    check_invariance,
    full_state_dict,
    load_pretrained,
    plan_for,
    tensor_unparallelize,
)

X = torch.ones(4, 4)
LINEAR = nn.Linear(4, 4)
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
META = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.ReLU())
COUNTERS = torch.zeros(1, dtype=torch.int32)


def comm() -> Communicator:
    return Communicator.threads(1)[0]


def on(device: Any) -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=[device])


Case = tuple[Callable[[], Any], type[Exception], str]
CASES: dict[str, Case] = {
    "out": (lambda: comm().all_gather(X, out=[1]), TypeError, "out must be a tensor or None"),  # type: ignore[arg-type]
    "out of NumPy": (
        lambda: comm().reduce_scatter(X, out=np.ones(4)),  # type: ignore[arg-type]
        TypeError,
        "out must be a tensor or None, got ndarray",
    ),
    "ready": (
        lambda: comm().all_reduce_when_ready(X, [1], 1, 1),  # type: ignore[arg-type]
        TypeError,
        "ready must be a tensor, got list",
    ),
    "target": (
        lambda: comm().all_reduce_when_ready(X, COUNTERS, "1", 1),  # type: ignore[arg-type]
        TypeError,
        "target must be an int",
    ),
    "like": (lambda: comm().output((1,), 3), TypeError, "works on tensors, got int"),  # type: ignore[arg-type]
    "model": (lambda: tensor_parallelize(None, {}, comm()), TypeError, "model must be an nn.Mod"),  # type: ignore[type-var]
    "plan": (lambda: tensor_parallelize(LAYERS, None, comm()), TypeError, "plan must be a mapping"),  # type: ignore[arg-type]
    "key of plan": (
        lambda: tensor_parallelize(LAYERS, {0: "column"}, comm()),  # type: ignore[dict-item]
        TypeError,
        "a key of plan must be a pattern",
    ),
    "comm": (
        lambda: tensor_parallelize(LAYERS, {"0": "column"}, None),  # type: ignore[arg-type]
        TypeError,
        "comm must be a pipekernels.Communicator, got NoneType",
    ),
    "planned model": (lambda: plan_for(None, 2), TypeError, "model must be an nn.Module"),  # type: ignore[arg-type]
    "world size": (lambda: plan_for(LAYERS, 0, {}), ValueError, "world_size is 0"),
    "sharded model": (lambda: tensor_unparallelize(None), TypeError, "must be an nn.Module"),  # type: ignore[type-var]
    "state": (lambda: full_state_dict(None), TypeError, "must be an nn.Module"),  # type: ignore[arg-type]
    "invariance": (lambda: check_invariance(None, {}), TypeError, "model must be an nn.Module"),  # type: ignore[arg-type]
    "loaded model": (lambda: load_pretrained(None, "."), TypeError, "model must be an nn.Module"),  # type: ignore[arg-type]
    "folder": (lambda: load_pretrained(LAYERS, 3), TypeError, "folder must be a path"),  # type: ignore[arg-type]
    "store": (
        lambda: Communicator.from_store("tcp", 0, 1),  # type: ignore[arg-type]
        TypeError,
        "store must be a torch.distributed.Store, got str",
    ),
    "rank": (
        lambda: Communicator.from_store(dist.HashStore(), "0", 1),  # type: ignore[arg-type]
        TypeError,
        "rank must be an int",
    ),
    "no torchrun": (Communicator.from_process_group, RuntimeError, "start the program by torchrun"),
    "decoder": (
        lambda: generate_pipelined(None, X, [], chunks=1),
        TypeError,
        "model must be a decoder",
    ),
    "tokens": (
        lambda: generate_pipelined(LINEAR, "a", [], chunks=1),  # type: ignore[arg-type]
        TypeError,
        "input_ids must be a tensor",
    ),
    "norms": (lambda: convert_deferred_batch_norm([]), TypeError, "module must be an nn.Module"),  # type: ignore[arg-type]
    "skips": (lambda: skip.verify_skippables(None), TypeError, "module must be an nn.Sequential"),  # type: ignore[arg-type]
    "scale": (
        lambda: plan_pipeline(LAYERS, X, param_scale=float("inf")),
        ValueError,
        "param_scale is inf; it must be finite",
    ),
    "map": (
        lambda: parallelize_pipeline(LAYERS, None),  # type: ignore[arg-type]
        TypeError,
        "module_to_device must be a mapping",
    ),
    "placed model": (lambda: unparallelize_pipeline(None), TypeError, "model must be an nn.Module"),  # type: ignore[arg-type]
    "meta": (
        lambda: Pipe(META, [1, 1], devices=["cpu"] * 2),
        ValueError,
        "'0.weight' is on the meta device.*to_empty",
    ),
    "gpu:0": (lambda: on("gpu:0"), RuntimeError, "torch knows no device 'gpu:0'; name 'cpu'"),
    "placed on gpu:0": (lambda: parallelize_module(LINEAR, "gpu:0"), RuntimeError, "'gpu:0'"),
    "hpu": (lambda: on("hpu"), RuntimeError, "device 'hpu' cannot be used"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_argument_is_refused_by_name(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=message):
        call()


def test_a_slice_of_a_pipe_is_a_sequence_of_its_layers() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [2, 1], chunks=2)
    part = pipe[1:]
    assert type(part) is nn.Sequential and list(part) == [pipe[1], pipe[2]]
    assert [name for name, _ in part.named_children()] == ["1", "2"]
