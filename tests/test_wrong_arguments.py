"""Arguments of wrong types and values are refused by name, not by what they break."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipekernels import (
    Communicator,
    Pipe,
    parallelize_pipeline,
    skip,
    tensor_parallelize,
    unparallelize_pipeline,
)
from pipekernels.batchnorm import convert_deferred_batch_norm
from pipekernels.tensor_parallel import (
    full_state_dict,
    load_pretrained,
    plan_for,
    tensor_unparallelize,
)

X = torch.ones(4, 4)
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
META = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.ReLU())


def comm() -> Communicator:
    return Communicator.threads(1)[0]


def on(device: Any) -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=[device])


REFUSED: dict[str, tuple[Any, str]] = {  # By a TypeError.
    "out": (lambda: comm().all_gather(X, out=cast(Any, [1])), "out must be a tensor or None"),
    "like": (lambda: comm().output((1,), cast(Any, 3)), "works on tensors, got int"),
    "model": (lambda: tensor_parallelize(None, {}, comm()), "model must be an nn.Mod"),
    "plan": (lambda: tensor_parallelize(LAYERS, None, comm()), "plan must be a mapping"),
    "key of plan": (
        lambda: tensor_parallelize(LAYERS, cast(Any, {0: "column"}), comm()),
        "a key of plan must be a pattern",
    ),
    "comm": (
        lambda: tensor_parallelize(LAYERS, {"0": "column"}, cast(Any, 2)),
        "comm must be a pipekernels.Communicator, got int",
    ),
    "planned model": (lambda: plan_for(None, 2), "model must be an nn.Module"),
    "sharded model": (lambda: tensor_unparallelize(None), "must be an nn.Module"),
    "state": (lambda: full_state_dict(None), "must be an nn.Module"),
    "loaded model": (lambda: load_pretrained(None, "."), "model must be an nn.Module"),
    "folder": (lambda: load_pretrained(LAYERS, cast(Any, 3)), "folder must be a path"),
    "store": (
        lambda: Communicator.from_store(cast(Any, "tcp"), 0, 1),
        "store must be a torch.distributed.Store, got str",
    ),
    "rank": (
        lambda: Communicator.from_store(dist.HashStore(), cast(Any, "0"), 1),
        "rank must be an int",
    ),
    "norms": (lambda: convert_deferred_batch_norm(cast(Any, [])), "module must be an nn.Module"),
    "maker": (Communicator, r"is made by Communicator.from_process_group\(\)"),
    "skips": (lambda: skip.verify_skippables(None), "module must be an nn.Sequential"),
    "mapped model": (
        lambda: parallelize_pipeline(cast(Any, len), {}),
        "model must be an nn.Module, got buil",
    ),
    "map": (lambda: parallelize_pipeline(LAYERS, None), "module_to_device must be a mapping"),
    "placed model": (lambda: unparallelize_pipeline(None), "model must be an nn.Module"),
}
OTHERS: dict[str, tuple[Any, type[Exception], str]] = {
    "world size": (lambda: plan_for(LAYERS, 0, {}), ValueError, "world_size is 0"),
    "word for a plan": (
        lambda: tensor_parallelize(LAYERS, cast(Any, "all"), comm()),
        ValueError,
        "must be a mapping or 'auto', got 'all'",
    ),
    "no torchrun": (Communicator.from_process_group, RuntimeError, "start the program by torchrun"),
    "meta": (
        lambda: Pipe(META, [1, 1], devices=["cpu"] * 2),
        NotImplementedError,
        "no data.*to_empty",
    ),
    "hpu": (lambda: on("hpu"), RuntimeError, "device 'hpu' cannot be used"),
}


@pytest.mark.parametrize("name", REFUSED | OTHERS)
def test_an_argument_is_refused_by_name(name: str) -> None:
    call, *error, message = (REFUSED | OTHERS)[name]
    with pytest.raises(*error or [TypeError], match=message):
        call()
