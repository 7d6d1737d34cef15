"""Generate text on N ranks, with a transformers model of which each rank holds a part.

    torchrun --nproc-per-node 2 examples/generate.py

The model has random weights; give it yours with --folder, which save_pretrained() has written.
With --experts it is a mixture of so many experts, two of which a token is routed to. Prints the
plan, the new tokens, and tokens per second and the memory of a rank beside those of one process.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import load_pretrained, plan_for


def build(args: argparse.Namespace) -> torch.nn.Module:
    """The model, the same on every rank; on the meta device if its weights are in a folder."""
    torch.manual_seed(args.seed)
    if args.folder is None:
        sizes = {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
            "pad_token_id": 0,
        }  # fmt: skip
        config = LlamaConfig(**sizes)
        if args.experts:
            config = MixtralConfig(**sizes, num_local_experts=args.experts, num_experts_per_tok=2)
        return AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.folder))


def generate(model: torch.nn.Module, prompt: torch.Tensor, args: argparse.Namespace) -> list[int]:
    """The new tokens, drawn with the same random numbers on every rank."""
    torch.manual_seed(args.seed)
    begin = time.perf_counter()
    tokens = model.eval().generate(
        prompt, max_new_tokens=args.new, min_new_tokens=args.new, do_sample=args.sample
    )
    seconds = time.perf_counter() - begin
    if int(os.environ["RANK"]) == 0:
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        print(f"  {args.new / seconds:.1f} tokens/s, {nbytes / 2**20:.1f} MiB of weights on rank 0")
    return tokens[0, prompt.shape[1] :].tolist()


def main() -> None:
    """Generate with all ranks, then with rank 0 alone, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="safetensors files; default: random weights")
    parser.add_argument("--experts", type=int, default=0, help="number of experts; default: none")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 5, 9, 13], help="tokens")
    parser.add_argument("--new", type=int, default=32, help="number of new tokens")
    parser.add_argument("--sample", action="store_true", help="draw tokens; default: greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, prompt = dist.get_rank(), torch.tensor([args.prompt], device=device)

    model = build(args)
    if rank == 0:
        print(plan_for(model, dist.get_world_size()))
        print(f"{dist.get_world_size()} ranks:")
    with Communicator.from_process_group() as comm:
        tensor_parallelize(model, "auto", comm)
        if args.folder is not None:
            load_pretrained(model, args.folder, device)
        found = generate(model.to(device), prompt, args)
    if rank == 0:
        print("one process:")
        whole = build(args)
        if args.folder is not None:
            load_pretrained(whole, args.folder, device)
        expected = generate(whole.to(device), prompt, args)
        print(f"new tokens: {found}")
        if found != expected:
            raise SystemExit(f"one process gives other tokens: {expected}")
        print("one process gives the same tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
