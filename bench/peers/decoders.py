"""Engines that decode on CPUs, with a Llama of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from bench.processes import NODE_PEERS, OPENVINO, Serve

THREADS = 2
ALONE = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # For torch without this package.


class Work(NamedTuple):
    """What is generated greedily, and what counts: the tokens, or the prompt."""

    sequences: int
    prompt: int  # Tokens of each.
    new: int

    def prompts(self) -> list[list[int]]:
        """Random tokens, the same at each call."""
        drawn = np.random.default_rng(1).integers(3, 32000, (self.sequences, self.prompt))
        found: list[list[int]] = drawn.tolist()
        return found


WORKS = {
    "a token": Work(1, 64, 33),
    "a token of each of 8 sequences": Work(8, 64, 17),
    "a prompt of 64 tokens": Work(1, 64, 1),
    "a prompt of 512 tokens": Work(1, 512, 1),
}
CHECKED = WORKS["a token"]
Generated = tuple[float, float, list[list[int]]]
"""Seconds to the first new tokens, seconds per later one, and all new ones."""
Generate = Callable[[list[list[int]], int], Generated]
"""Given prompts and a number of tokens; generates so many for each, greedily."""


def serve(generate: Generate, serve: Serve, folder: Path, *, exact: bool) -> None:
    """Check the tokens of :data:`CHECKED`, then serve turns: a name of :data:`WORKS` to seconds.

    Raises:
        AssertionError: the first tokens are others than the model in ``folder`` has generated, and
            the engine computes in float32 (``exact``), or there are not so many.
    """
    *_, found = generate(CHECKED.prompts(), CHECKED.new)
    assert [len(each) for each in found] == [CHECKED.new]
    if exact:
        # Later ones may differ by rounding, of another order of sums.
        (expected,) = json.loads((folder / "tokens.json").read_text())
        assert found[0][:8] == expected[:8]

    def turn(name: str) -> float:
        work = WORKS[name]
        first, token, _ = generate(work.prompts(), work.new)
        return token if work.new > 1 else first

    serve(turn)


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


def llama_cpp(rank: int, port: int, to: Serve, folder: Path, dtype: Any, kind: str) -> None:
    """A worker: llama.cpp of node-llama-cpp, built for the machine, with weights of the GGUF type
    ``kind``."""
    size = max(work.sequences * (work.prompt + work.new) for work in WORKS.values())
    sequences = max(work.sequences for work in WORKS.values())
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        write_gguf(folder, Path(file.name), kind)
        program = NODE_PEERS / "llama_cpp.mjs"  # Node looks for packages beside a program.
        program.write_text(Path(__file__).with_name("llama_cpp.mjs").read_text())
        generate = by_program(["node", program, file.name, THREADS, sequences, size])
    serve(generate, to, folder, exact=kind == "f32")


def openvino(rank: int, port: int, to: Serve, folder: Path, dtype: Any, kind: str) -> None:
    """A worker: OpenVINO, with weights that its own converter rounds to ``kind``."""
    with tempfile.TemporaryDirectory() as own:
        command = f"export openvino -m {folder} {own} --task text-generation-with-past".split()
        command += ["--weight-format", kind, "--disable-convert-tokenizer"]
        subprocess.run([OPENVINO.with_name("optimum-cli"), *command], check=True, env=ALONE)
        engine = Path(__file__).with_name("openvino_engine.py")
        generate = by_program([OPENVINO, engine, own, THREADS])
    serve(generate, to, folder, exact=False)


def by_program(command: Sequence[object]) -> Generate:
    """Generates by a program that reads and writes the lines of ``llama_cpp.mjs``."""
    pipe = subprocess.PIPE
    engine = subprocess.Popen(list(map(str, command)), stdin=pipe, stdout=pipe, text=True)
    requests, answers = cast("IO[str]", engine.stdin), cast("IO[str]", engine.stdout)
    assert answers.readline() == "ready\n"

    def generate(prompts: list[list[int]], new: int) -> Generated:
        print(json.dumps({"prompts": prompts, "new": new}), file=requests, flush=True)
        answer = json.loads(answers.readline())
        return answer["first"] / 1e3, answer["token"] / 1e3, answer["found"]

    return generate


def ctranslate2(rank: int, port: int, to: Serve, folder: Path, dtype: Any, kind: str) -> None:
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

    def generate(prompts: list[list[int]], new: int) -> Generated:
        begin, times = time.perf_counter(), list[float]()
        starts = [[names[i] for i in prompt] for prompt in prompts]

        def told(step: Any) -> bool:
            times.append(time.perf_counter())
            return False

        options = {"max_length": new, "min_length": new, "sampling_topk": 1}
        results = model.generate_batch(
            starts, include_prompt_in_result=False, callback=told, **options
        )
        found = [list(each.sequences_ids[0]) for each in results]
        first, last = times[len(prompts) - 1], times[-1]
        return first - begin, (last - first) / max(new - 1, 1), found

    serve(generate, to, folder, exact=kind == "float32")


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the model in ``folder`` as GGUF, with matrices of type ``kind``: f32, bf16,
    q8_0 or q4_0."""
    import gguf
    from safetensors import safe_open

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
    # llama.cpp wants a token for each byte.
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [f"t{i}" for i in range(len(names), vocabulary)]
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * vocabulary)
    kinds, normal = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2], gguf.TokenType.NORMAL
    kinds += [gguf.TokenType.BYTE] * 256 + [normal] * (vocabulary - 259)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    renamed = WHOLE | {
        f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight"
        for i in range(layers)
        for theirs, ours in OF_LAYER.items()
    }
    quantized = gguf.GGMLQuantizationType[kind.upper()]
    file = safe_open(folder / "model.safetensors", framework="pt")
    for name in file.keys():  # noqa: SIM118 - a safetensors file cannot be iterated
        value = file.get_tensor(name).float().numpy()
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
