"""A Llama with random weights that generates greedily, in one process or split over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from demo.ranks import RANKS
from demo.sizes import Sizes
from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import compile_decoding, quantize_weights

PROMPT, HEADS = 32, 12
BITS = 4

Turn = Callable[[], tuple[float, tuple[int, ...]]]  # Returns seconds and new tokens.


def parameters(sizes: Sizes) -> int:
    """Parameters of the tied embedding, attention and MLP; norms are left out."""
    width = sizes.llama_width
    return sizes.llama_vocabulary * width + sizes.llama_layers * 12 * width**2


def prepare_whole(rank: int, sizes: Sizes, dtype: torch.dtype) -> Turn:
    """A turn generates in this process, with as many threads as there are ranks."""
    torch.set_num_threads(RANKS)
    return _turn(_new_model(sizes).to(dtype), sizes)


def prepare_integers(rank: int, sizes: Sizes, compiled: bool) -> Turn:
    """A turn generates on all ranks together, with weights of integers."""
    comm = Communicator.from_process_group()
    model = quantize_weights(tensor_parallelize(_new_model(sizes), "auto", comm), bits=BITS)
    if compiled:
        compile_decoding(model, PROMPT + sizes.llama_new_tokens)
    return _turn(model, sizes)


def _new_model(sizes: Sizes) -> Any:
    """The model, with the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.llama_width,
        intermediate_size=sizes.llama_width * 8 // 3,
        num_hidden_layers=sizes.llama_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=sizes.llama_vocabulary,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def _turn(model: Any, sizes: Sizes) -> Turn:
    generator = torch.Generator().manual_seed(1)
    shape, new = (1, PROMPT), sizes.llama_new_tokens
    prompt = torch.randint(3, sizes.llama_vocabulary, shape, generator=generator)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}

    def turn() -> tuple[float, tuple[int, ...]]:
        begin = time.perf_counter()
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        seconds = time.perf_counter() - begin
        return seconds, tuple(tokens[0, PROMPT:].tolist())

    return turn
