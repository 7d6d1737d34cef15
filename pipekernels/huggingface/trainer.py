"""transformers' ``Trainer`` for models whose layers are sharded over the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from pipekernels.huggingface.accelerator import adapt_accelerator
from pipekernels.huggingface.pretrained import replaced
from pipekernels.tensor_parallel.state import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)


class TrainerMixin:
    """Makes a ``Trainer`` of transformers train a model that ``tensor_parallelize`` has sharded
    over all ranks::

        class ShardedTrainer(TrainerMixin, Trainer):
            pass

        tensor_parallelize(model, "auto", comm)
        ShardedTrainer(model, TrainingArguments(...), train_dataset=...).train()

    All ranks get the same batches, of ``per_device_train_batch_size`` samples, and clip by the norm
    of the full gradients. Checkpoints are those of one process, with full weights and optimizer
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
        base._track_num_input_tokens(inputs)  # Adds those of all ranks, which have the same.
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.get_tp_size()

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
