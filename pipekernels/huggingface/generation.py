"""Methods of transformers models with sharded layers, whose ``generate`` decides the same on all
ranks."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipekernels.comm import Communicator
from pipekernels.huggingface.pretrained import communicators


def unknown_cache_shape(model: Any) -> None:
    """The first keys and values, not the configuration, decide the shapes of a static cache."""


def get_stopping_criteria(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stop where rank 0 does: clocks differ between ranks, and custom criteria may read values that
    differ."""
    criteria = type(model)._get_stopping_criteria(model, *args, **kwargs)
    for i, own in enumerate(criteria):
        found = type(own)
        if found.__name__ == "MaxTimeCriteria" or not found.__module__.startswith("transformers."):
            criteria[i] = partial(_as_on_rank_0, own, communicators(model))
    return criteria


def _as_on_rank_0(own: Any, comms: list[Communicator], *args: Any, **kwargs: Any) -> Tensor:
    is_done: Tensor = own(*args, **kwargs)
    for comm in comms:
        comm.broadcast(is_done)
    return is_done


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate``, to which callers give the same inputs on all ranks. A model that samples draws
    the random numbers of rank 0 on all of them."""
    if _samples(model, *args, **kwargs):
        for comm in communicators(model):
            _share_random_numbers(comm, model.device)
    return type(model).generate(model, *args, **kwargs)


def _share_random_numbers(comm: Communicator, device: torch.device) -> None:
    if len(set(comm._exchange(os.getpid(), int))) < comm.world_size:
        raise RuntimeError(
            "generate() samples, but ranks are threads that share a random number generator, so "
            "each would draw other tokens; start one process per rank, or pass do_sample=False"
        )
    if device.type == "cuda":
        torch.cuda.set_rng_state(comm.broadcast(torch.cuda.get_rng_state(device)), device)
    else:
        torch.set_rng_state(comm.broadcast(torch.get_rng_state()))


def _samples(
    model: Any, inputs: Any = None, generation_config: Any = None, *_: Any, **kwargs: Any
) -> bool:
    asked = kwargs.get("do_sample")
    if asked is None:
        asked = (generation_config or model.generation_config).do_sample
    return bool(asked)
