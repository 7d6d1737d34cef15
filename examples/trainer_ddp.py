"""``Trainer`` of transformers, and accelerate, with data parallelism on the backend "pipekernels".

    torchrun --nproc-per-node 2 examples/trainer_ddp.py

or ``accelerate launch --multi_gpu --num_processes 2``, which starts as many processes without GPUs.
Both take the process group that they find; by name they know no such backend. Prints which backend
they use, and the loss.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

# Where pipekernels is installed, torch knows the backend already.
if not dist.is_backend_available("pipekernels"):
    import pipekernels.distributed  # noqa: F401


def build() -> GPT2LMHeadModel:
    """A small model, with the same weights on all ranks."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def data() -> list[dict[str, list[int]]]:
    """Sequences that count up."""
    rows = [[(first + i) % 50 for i in range(8)] for first in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    dist.init_process_group("pipekernels")  # Before Trainer or Accelerator is made.
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=steps, save_strategy="no", report_to="none",
            logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(build(), arguments, train_dataset=data())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(3, 3)
    model = accelerator.prepare(layer)
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    averaged = layer.weight.grad.unique().tolist()
    if dist.get_rank() == 0:
        wrapped = type(trainer.model_wrapped).__name__
        print(f"Trainer: {wrapped} on {dist.get_backend()}, {arguments.world_size} ranks")
        print(f"losses: {float(losses[0]):.4f} to {float(losses[-1]):.4f}")
        print(f"accelerate: {type(model).__name__}, averaged gradients {averaged}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
