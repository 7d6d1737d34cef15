"""Fine-tune a transformers model with LoRA under Trainer, each rank holding a part of the model.

    torchrun --nproc-per-node 2 examples/finetune_lora.py

The model has random weights and learns to count; give it yours with --folder, which
save_pretrained() has written. Prints the losses, and those of one process; --output keeps the
checkpoints, which peft and Trainer read without this package.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import TrainerMixin


class ShardedTrainer(TrainerMixin, Trainer):
    """A Trainer for sharded models."""


def build(folder: str | None) -> torch.nn.Module:
    """The model with adapters, the same on every rank."""
    torch.manual_seed(0)
    if folder is None:
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(model, adapters)


def losses(trainer: Trainer) -> list[float]:
    """Trains; the loss of every step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Fine-tune with all ranks, then in one process, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="of a model; default: random weights")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", help="folder for checkpoints; default: none are kept")
    args = parser.parse_args()

    data = [{"input_ids": list(range(i, i + 16))} for i in range(1, 41)]
    for sample in data:
        sample["labels"] = sample["input_ids"]
    arguments = TrainingArguments(
        output_dir=args.output or tempfile.gettempdir(), max_steps=args.steps, learning_rate=1e-2,
        per_device_train_batch_size=8, logging_steps=1, report_to="none", disable_tqdm=True,
        save_strategy="no" if args.output is None else "steps", save_steps=args.steps,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip

    if "RANK" not in os.environ:  # One process.
        print(json.dumps(losses(Trainer(build(args.folder), arguments, train_dataset=data))))
        return

    with Communicator.from_process_group() as comm:
        model = tensor_parallelize(build(args.folder), "auto", comm)
        found = losses(ShardedTrainer(model, arguments, train_dataset=data))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks:", *[f"{loss:.6f}" for loss in found])
        alone = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        command = [sys.executable, __file__, "--steps", str(args.steps)]
        command += [] if args.folder is None else ["--folder", args.folder]
        done = subprocess.run(command, env=alone, check=True, capture_output=True, text=True)
        expected = json.loads(done.stdout.splitlines()[-1])
        print("one process:", *[f"{loss:.6f}" for loss in expected])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
