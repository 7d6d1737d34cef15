"""Engines that decode on CPUs, llama.cpp and CTranslate2, with a Llama of transformers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.processes import Serve, repeated

THREADS = 2
Decode = Callable[[list[int], int], list[int]]
"""Given a prompt and a number of tokens; returns so many more, greedily."""

# Names of GGUF by those of transformers.
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp(rank: int, port: int, serve: Serve, folder: Path, dtype: Any, kind: str) -> None:
    """A worker: llama.cpp, with weights of the GGUF type ``kind``."""
    from llama_cpp import Llama, llama_get_logits

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        write_gguf(folder, Path(file.name), kind)
        options = {"n_threads": THREADS, "n_threads_batch": THREADS}
        model = Llama(file.name, n_ctx=512, use_mmap=False, verbose=False, **options)

    def decode(prompt: list[int], new: int) -> list[int]:
        model.reset()
        found: list[int] = []
        while len(found) < new:
            model.eval(found[-1:] or prompt)
            logits = llama_get_logits(model.ctx)  # Of the last token.
            found.append(int(np.argmax(np.ctypeslib.as_array(logits, (model.n_vocab(),)))))
        return found

    _serve(decode, serve, folder, exact=kind == "f32")


def ctranslate2(rank: int, port: int, serve: Serve, folder: Path, dtype: Any, kind: str) -> None:
    """A worker: CTranslate2, with weights of its type ``kind``."""
    import ctranslate2 as engine
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, PreTrainedTokenizerFast

    names = [f"t{i}" for i in range(AutoConfig.from_pretrained(folder).vocab_size)]
    with tempfile.TemporaryDirectory() as own:
        for file in folder.iterdir():  # The converter wants a tokenizer beside the model.
            Path(own, file.name).symlink_to(file)
        ids = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t0")
        special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(ids), **special).save_pretrained(own)
        converter = engine.converters.TransformersConverter(own)
        converter.convert(f"{own}/converted", quantization=kind)
        options = {"compute_type": kind, "inter_threads": 1, "intra_threads": THREADS}
        model = engine.Generator(f"{own}/converted", device="cpu", **options)

    def decode(prompt: list[int], new: int) -> list[int]:
        (result,) = model.generate_batch(
            [[names[i] for i in prompt]],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return list(result.sequences_ids[0])

    _serve(decode, serve, folder, exact=kind == "float32")


def _serve(decode: Decode, serve: Serve, folder: Path, *, exact: bool) -> None:
    """Check the first tokens, then serve turns.

    Raises:
        AssertionError: they are others than the model in ``folder`` has generated, and the engine
            computes in float32 (``exact``), or there are not so many.
    """
    (tokens,) = json.loads((folder / "tokens.json").read_text())
    prompt, expected = tokens[:32], tokens[32:]
    found = decode(prompt, len(expected))
    # Later ones may differ by rounding, of another order of sums.
    assert len(found) == len(expected) and not (exact and found[:8] != expected[:8])
    turn = repeated(lambda: decode(prompt, len(expected)), 1, warmup=0)
    serve(lambda: turn() / len(expected))


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the model in ``folder`` as GGUF, with matrices of type ``kind``: f32, bf16,
    q8_0 or q4_0."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocabulary, layers = config["vocab_size"], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(2048)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}".encode() for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([1] * vocabulary)
    renamed = WHOLE | {
        f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight"
        for i in range(layers)
        for theirs, ours in OF_LAYER.items()
    }
    quantized = gguf.GGMLQuantizationType[kind.upper()]
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates pairs of neighbours, transformers a half with the other half.
            groups = heads if name.endswith("q_proj.weight") else key_heads
            halves = value.reshape(groups, 2, -1, value.shape[1]).swapaxes(1, 2)
            value = np.ascontiguousarray(halves).reshape(value.shape)
        if value.ndim == 1 or kind == "f32":
            writer.add_tensor(renamed[name], value)
        else:
            data = gguf.quants.quantize(value, quantized)
            writer.add_tensor(renamed[name], data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
