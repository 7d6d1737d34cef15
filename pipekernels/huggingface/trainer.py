"""transformers' ``Trainer`` and accelerate's ``Accelerator`` for models with sharded layers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from math import ceil
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipekernels.huggingface.pretrained import replaced
from pipekernels.tensor_parallel.clip import clip_grad_norm_
from pipekernels.tensor_parallel.sharded import sharded_layers
from pipekernels.tensor_parallel.state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
)


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
                f"clip_grad_norm_ got {len(given)} parameters, not the parameters of the model "
                "that the Accelerator was adapted to; pass model.parameters()"
            )
        return clip_grad_norm_(model, max_norm, norm_type)

    def state(other: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if sharded_layers(other):
            return full_state_dict(accelerator.unwrap_model(other))
        return get_state_dict(other, *args, **kwargs)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        # What a single process does: cut what was repeated up to the size of a batch.
        state = accelerator.gradient_state
        rest = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
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


class _Metrics(dict[str, Any]):
    """Metrics to which Trainer adds ``steps_per_second``, made ``times`` as large."""

    def __init__(self, metrics: Mapping[str, Any], times: float) -> None:
        super().__init__(metrics)
        self._times = times

    def update(self, more: Mapping[str, Any]) -> None:  # type: ignore[override]
        for key, value in more.items():
            self[key] = value * self._times if key.endswith("_steps_per_second") else value


def _with_gradients(parameters: Iterable[Tensor]) -> set[Tensor]:
    return {parameter for parameter in parameters if parameter.grad is not None}


def _refuse_state(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "save_state and load_state would save the shards of one rank and load them on all; save "
        "model.save_pretrained(folder) and full_optimizer_state_dict(model, optimizer) of "
        "pipekernels.tensor_parallel, and load them with model.load_state_dict() and "
        "load_full_optimizer_state_dict()"
    )


class TrainerMixin:
    """Makes a ``Trainer`` of transformers train a model that ``tensor_parallelize`` has sharded
    over all ranks::

        class ShardedTrainer(TrainerMixin, Trainer):
            pass

        tensor_parallelize(model, "auto", comm)
        ShardedTrainer(model, TrainingArguments(...), train_dataset=...).train()

    All ranks get the same batches, of ``per_device_train_batch_size`` samples, and clip by the norm
    of the full gradients. Checkpoints are like one process's, with full weights and optimizer
    state: training resumes from them on any number of ranks, and with ``Trainer`` alone.

    Raises:
        TypeError: the class has no ``Trainer`` as a later base, or one without a method that this
            one extends.
        ValueError: as :func:`adapt_accelerator`, from ``__init__``.
    """

    accelerator: Any
    args: Any
    gather_function: Any
    model: nn.Module
    state: Any
    optimizer: Any  # accelerate's wrapper of one.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(TrainerMixin).items():
            if callable(value) and not hasattr(super(), name):
                raise TypeError(
                    f"the bases of {cls.__name__} after TrainerMixin have no method {name}(), "
                    "which it extends; name transformers' Trainer after it, as of version 5.23"
                )

    def create_accelerator_and_postprocess(self) -> None:
        base: Any = super()
        base.create_accelerator_and_postprocess()
        adapt_accelerator(self.accelerator, self.model)
        self.gather_function = self.accelerator.gather_for_metrics
        # get_tp_size() divides what is summed over the ranks; without the sum it would divide too.
        self.args.average_tokens_across_devices = True

    def get_tp_size(self) -> int:
        return int(self.args.world_size)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        base: Any = super()
        before = self.state.num_input_tokens_seen
        base._track_num_input_tokens(inputs)  # Adds all ranks' tokens, which are the same.
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.get_tp_size()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        output = base.evaluation_loop(*args, **kwargs)
        # Trainer adds speeds to the metrics, as if each rank had evaluated a part of the batches.
        batch, ranks = self.args.eval_batch_size, self.args.world_size
        counted = ceil(output.num_samples / (batch * ranks))
        times = ceil(output.num_samples / batch) / max(counted, 1)
        return output._replace(metrics=_Metrics(output.metrics, times))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        base: Any = super()
        if self.args.should_save:
            base._save(output_dir, state_dict)  # Calls save_pretrained, once.
        else:
            save_pretrained: Any = self.model.save_pretrained
            save_pretrained(output_dir or self.args.output_dir, is_main_process=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        base: Any = super()
        state = full_optimizer_state_dict(self.model, self.optimizer.optimizer)
        # Numbers in place of names, as in the state of one process.
        names = [name for group in state["param_groups"] for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        state["state"] = {numbers[name]: value for name, value in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [numbers[name] for name in group["params"]]
        with replaced(self.optimizer, "state_dict", lambda: state):
            base._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        base: Any = super()
        load = partial(load_full_optimizer_state_dict, self.model, self.optimizer.optimizer)
        with replaced(self.optimizer, "load_state_dict", load):
            base._load_optimizer_and_scheduler(checkpoint)
