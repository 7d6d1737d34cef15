"""Methods of transformers models with sharded layers, whose ``save_pretrained`` writes the full
model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.sharded import ShardedLayer, sharded_layers, sharded_parameters
from pipekernels.tensor_parallel.state import gather_state_dict


def communicators(model: nn.Module) -> list[Communicator]:
    """Those of the sharded layers in ``model``."""
    return list(dict.fromkeys(layer.comm for layer in sharded_layers(model)))


@contextmanager
def replaced(instance: object, name: str, method: object) -> Iterator[None]:
    """Replaces an instance's method ``name`` with ``method``."""
    setattr(instance, name, method)
    try:
        yield
    finally:
        delattr(instance, name)


def resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Sharded embeddings cannot be resized."""
    ends = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    if (args or kwargs) and any(map(sharded_layers, ends)):
        raise TypeError(
            "resize_token_embeddings cannot resize embeddings or heads that are sharded; call it "
            "before tensor_parallelize, or after tensor_unparallelize"
        )
    return type(model).resize_token_embeddings(model, *args, **kwargs)


_KINDS = {kind.__name__: kind for kind in (FileNotFoundError, ImportError, ValueError)}


@contextmanager
def raised_on_all(model: nn.Module) -> Iterator[None]:
    """Raises an error of its body on all ranks of the sharded layers in ``model``: of one of the
    classes ``_KINDS``, else a RuntimeError; with the rank. A collective."""
    comms, problem, cause = communicators(model), ["", ""], None
    try:
        yield
    except Exception as error:
        if not comms:
            raise
        kind, cause = type(error).__name__, error
        prefix = "" if kind in _KINDS else f"{kind}: "
        problem = [kind, f"rank {comms[0].rank}: {prefix}{error}"]
    for comm in comms:
        problem = next(filter(any, comm._exchange(problem, list[str])), problem)
    if any(problem):
        raise _KINDS.get(problem[0], RuntimeError)(problem[1]) from cause


def save_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Save the full weights. A collective: rank 0 writes, the others wait for it."""
    for layer in sharded_layers(model):
        if layer.integers:
            raise TypeError(
                f"{layer.name!r} has weights of integers, which this does not write; call "
                "tensor_unparallelize() first, or save full_state_dict(model)"
            )
    comms = communicators(model)
    writes = is_main_process and all(comm.rank == 0 for comm in comms)
    if state_dict is None:
        state_dict = gather_state_dict(model, keep=writes)
    else:
        _check_full(model, state_dict)
    with raised_on_all(model):
        if writes:
            shards = sharded_parameters(model).items()
            shapes = {parameter: layer.full_shape(name) for parameter, (layer, name) in shards}
            count = sum(prod(shapes.get(p, p.shape)) for p in model.parameters())
            with replaced(model, "num_parameters", lambda *_, **__: count):  # For the files' index.
                type(model).save_pretrained(model, save_directory, state_dict=state_dict, **kwargs)


def _check_full(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    for prefix, layer in model.named_modules():
        for name in layer.shard_dims if isinstance(layer, ShardedLayer) else ():
            value = state_dict.get(f"{prefix}.{name}")
            if value is not None and tuple(value.shape) != layer.full_shape(name):
                raise ValueError(
                    f"state_dict has a '{prefix}.{name}' of shape {tuple(value.shape)}, a shard; "
                    f"the full model's is {layer.full_shape(name)}: pass full_state_dict(model), "
                    "or none and call save_pretrained on all ranks"
                )
