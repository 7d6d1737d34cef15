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


def prepare_integers(rank: int, sizes: Sizes) -> Turn:
    """A turn generates on all ranks together, with weights of integers."""
    model = _with_integers(_new_model(sizes))
    compile_decoding(model, PROMPT + sizes.llama_new_tokens)
    return _turn(model, sizes)


def prepare_comparison(rank: int, sizes: Sizes) -> Callable[[tuple[int, ...]], tuple[float, float]]:
    """A turn compares tokens with what one process computes from the same integers.

    It returns by how much a token's logit falls short of the largest one, at most, and the
    rounding error of a logit in float32, both against float64. Rounding moves activations over
    the bounds between integers, so tokens of float32 depend on the order of each sum.
    """
    exact = _with_integers(_new_model(sizes).double())
    single = _with_integers(_new_model(sizes))

    @torch.inference_mode()
    def turn(tokens: tuple[int, ...]) -> tuple[float, float]:
        new = torch.tensor([tokens])
        ids = torch.cat([_prompt(sizes), new[:, :-1]], 1)
        logits = exact(ids).logits[:, PROMPT - 1 :]
        error = (single(ids).logits[:, PROMPT - 1 :] - logits).abs().max()
        short = logits.amax(-1) - logits.gather(-1, new[..., None])[..., 0]
        return short.max().item(), error.item()

    return turn


def _with_integers(model: Any) -> Any:
    comm = Communicator.from_process_group()
    return quantize_weights(tensor_parallelize(model, "auto", comm), bits=BITS)


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


def _prompt(sizes: Sizes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, sizes.llama_vocabulary, (1, PROMPT), generator=generator)


def _turn(model: Any, sizes: Sizes) -> Turn:
    prompt, new = _prompt(sizes), sizes.llama_new_tokens
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}

    def turn() -> tuple[float, tuple[int, ...]]:
        begin = time.perf_counter()
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        seconds = time.perf_counter() - begin
        return seconds, tuple(tokens[0, PROMPT:].tolist())

    return turn
