"""Methods of transformers models with sharded layers, whose ``generate`` decides the same on all
ranks."""

from __future__ import annotations

import os
import warnings
import zlib
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
    """``generate``, to which callers give the same inputs on all ranks, if ranks will draw the same
    random numbers; else RuntimeError."""
    if _samples(model, *args, **kwargs):
        for comm in communicators(model):
            _check_random_numbers(comm, model.device)
    return type(model).generate(model, *args, **kwargs)


def _check_random_numbers(comm: Communicator, device: torch.device) -> None:
    # A digest of the generator's state, and which generator it is.
    is_cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
    generator = [os.getpid(), torch.cuda.current_device() if is_cuda else -1]
    own = torch.tensor([[zlib.crc32(state.numpy().tobytes()), *generator]], device="cpu")
    gathered = comm.all_gather(own).tolist()
    if len({tuple(generator) for _, *generator in gathered}) < len(gathered):
        raise RuntimeError(
            "generate() samples, but ranks are threads that share a random number generator, so "
            "each would draw other tokens; start one process per rank, or pass do_sample=False"
        )
    others = [rank for rank, (digest, *_) in enumerate(gathered) if digest != gathered[0][0]]
    if others:
        raise RuntimeError(
            f"generate() samples, but the random number generators of ranks {others} are in "
            "another state than that of rank 0, so they would draw other tokens; call "
            "torch.manual_seed(seed) with one seed on all ranks just before"
        )


def _samples(
    model: Any, inputs: Any = None, generation_config: Any = None, *_: Any, **kwargs: Any
) -> bool:
    asked = kwargs.get("do_sample")
    if asked is None:
        asked = (generation_config or model.generation_config).do_sample
    return bool(asked)


def warn_of_attentions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn when a model with sharded attention, whose hook this is, is to return its weights."""
    asked = kwargs.get("output_attentions")
    if not torch.compiler.is_compiling() and (
        model.config.output_attentions if asked is None else asked
    ):
        warnings.warn(
            "output_attentions=True returns the attention weights of this rank's heads only, where "
            "the attention is sharded",
            UserWarning,
            stacklevel=2,
        )
