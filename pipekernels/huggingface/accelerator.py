"""Adapts an ``Accelerator`` of Hugging Face's accelerate to sharded models."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipekernels.tensor_parallel.clip import clip_grad_norm_
from pipekernels.tensor_parallel.sharded import sharded_layers
from pipekernels.tensor_parallel.state import full_state_dict


def adapt_accelerator(accelerator: Any, model: nn.Module) -> None:
    """Let an ``Accelerator`` train ``model``, whose layers are sharded over all its processes.

    Call it on all ranks before ``accelerator.prepare``; transformers' ``Trainer`` needs
    :class:`TrainerMixin` instead. All ranks then get the same batches; the model is not wrapped in
    DistributedDataParallel; ``clip_grad_norm_`` clips by the norm of the full gradients;
    ``get_state_dict`` and ``save_model``, called on all ranks, give the full model; and
    ``gather_for_metrics`` returns its argument, since all ranks have the same values.
    ``save_state`` and ``load_state`` raise: they would give all ranks the shards of one rank.

    Args:
        accelerator: of accelerate 1.15.
        model: after ``tensor_parallelize``.

    Raises:
        ValueError: ``model`` is not sharded over as many ranks as there are processes, or
            ``accelerator`` shards models itself, or scales losses (``mixed_precision="fp16"``),
            which overflow on some ranks and not on others.
    """
    _check(accelerator, model)
    prepare_model, get_state_dict = accelerator.prepare_model, accelerator.get_state_dict

    def prepare(other: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if sharded_layers(other):
            kwargs["evaluation_mode"] = True  # No DistributedDataParallel.
        return prepare_model(other, *args, **kwargs)

    def clip(
        parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        if _with_gradients(given) != _with_gradients(model.parameters()):
            raise ValueError(
                f"clip_grad_norm_ got {len(given)} parameters, not those of the model that the "
                "Accelerator was adapted to; pass model.parameters()"
            )
        return clip_grad_norm_(model, max_norm, norm_type)

    def state(other: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if sharded_layers(other):
            return full_state_dict(accelerator.unwrap_model(other))
        return get_state_dict(other, *args, **kwargs)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        # What a single process does: cut what was repeated up to the size of a batch.
        state = accelerator.gradient_state
        rest = state.remainder if state.end_of_dataloader else 0
        if rest <= 0:
            return input_data
        if use_gather_object:
            return input_data[:rest]
        utils: Any = sys.modules["accelerate.utils"]
        return utils.recursively_apply(lambda tensor: tensor[:rest], input_data)

    # Data loaders give the ranks of a dimension "tp" the same batches.
    accelerator.state.device_mesh = init_device_mesh(
        accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("tp",)
    )
    accelerator.prepare_model, accelerator.get_state_dict = prepare, state
    accelerator.clip_grad_norm_, accelerator.gather_for_metrics = clip, gather_for_metrics
    accelerator.save_state = accelerator.load_state = _refuse_state


def _check(accelerator: Any, model: nn.Module) -> None:
    ranks = {layer.comm.world_size for layer in sharded_layers(model)}
    if ranks != {accelerator.num_processes}:
        over = f"over {' and '.join(map(str, sorted(ranks)))} ranks" if ranks else "not at all"
        raise ValueError(
            f"the model is sharded {over}, but accelerate has {accelerator.num_processes} "
            "processes; call tensor_parallelize first with a communicator of all of them, or train "
            "by a loop of your own with DistributedDataParallel over the other ranks"
        )
    name = accelerator.distributed_type.name
    if name not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(
            f"the Accelerator distributes models by {name}, which would shard the shards again; "
            "make it without a plugin"
        )
    if accelerator.mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision='fp16' scales losses and skips steps on the ranks whose shards "
            "overflow, so that ranks diverge; use 'bf16', which needs no scaling"
        )


def _with_gradients(parameters: Iterable[Tensor]) -> set[Tensor]:
    return {parameter for parameter in parameters if parameter.grad is not None}


def _refuse_state(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "save_state and load_state would save the shards of one rank and load them on all; save "
        "model.save_pretrained(folder) and full_optimizer_state_dict(model, optimizer) of "
        "pipekernels.tensor_parallel, and load them with model.load_state_dict() and "
        "load_full_optimizer_state_dict()"
    )
