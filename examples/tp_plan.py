"""Tensor parallelism by transformers itself, ``tp_plan="auto"``, on the backend "pipekernels".

    torchrun --nproc-per-node 2 examples/tp_plan.py

Without ``--folder``, the model is a small Llama with random weights. Prints the new tokens, and
whether one process gives the same.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

# Where pipekernels is installed, torch knows the backend already.
if not dist.is_backend_available("pipekernels"):
    import pipekernels.distributed  # noqa: F401


def make(folder: str) -> None:
    """Write a small model. In a process group, rank 0 alone would write."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="", help="of a model of transformers")
    parser.add_argument("--new", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = arguments.folder or f"{own}/model"
        if not arguments.folder:
            make(folder)
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        dist.init_process_group("pipekernels")
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, tp_plan="auto", tp_size=dist.get_world_size()
        )
    prompt = torch.arange(1, 9)[None]
    options = {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new, "do_sample": False}
    found = model.generate(prompt, **options)[0, 8:].tolist()
    alone = whole.generate(prompt, **options)[0, 8:].tolist()
    if dist.get_rank() == 0:
        print(f"new tokens: {found}")
        print(f"one process gives {'the same' if found == alone else f'others: {alone}'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
