"""Sharded models of transformers with weights of integers, and their states."""

import copy
from pathlib import Path

import pytest
import torch
from support.ranks import run_threads

transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface import load_pretrained
from pipekernels.huggingface.derive.small_models import small_model
from pipekernels.tensor_parallel import (
    checkpoint_state_dict,
    full_state_dict,
    quantize_weights,
    tensor_unparallelize,
)

FAMILIES = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
    "Mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig),
    "GptOss": (transformers.GptOssForCausalLM, transformers.GptOssConfig),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_those_of_the_dequantized_model(family: str, tmp_path: Path) -> None:
    kind, config = FAMILIES[family]
    # The kernel, which rounds the input of a layer too, does not take float64.
    full = small_model(kind, config(num_hidden_layers=2)).double()
    with torch.device("meta"):
        empty = kind(full.config).double().eval()
    ids = torch.randint(3, 61, (1, 7))

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copy.deepcopy(full), "auto", comm)
        quantize_weights(model)
        assert any(p.dtype == torch.uint8 for p in model.parameters())
        logits = model(input_ids=ids).logits
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
        with pytest.raises(TypeError, match="has weights of integers, which this does not write"):
            model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="they lack '.*scale'"):
            load_pretrained(model, folder)
        with pytest.raises(TypeError, match=r"integers in the kernel's order.*full_state_dict"):
            checkpoint_state_dict(model)
        # The full state is read back by each rank in parts.
        state = full_state_dict(model)
        if comm.rank == 0:
            (tmp_path / "integers").mkdir()
            save_file(state, tmp_path / "integers" / "model.safetensors")
        comm.barrier()
        other = tensor_parallelize(copy.deepcopy(full), "auto", comm)
        for parameter in other.parameters():
            parameter.data.mul_(2)
        load_pretrained(quantize_weights(other), tmp_path / "integers")
        assert other(input_ids=ids).logits.equal(logits)
        # Read and quantized layer by layer.
        read = tensor_parallelize(copy.deepcopy(empty), "auto", comm)
        load_pretrained(read, folder, bits=8)
        assert read(input_ids=ids).logits.equal(logits)
        assert not any(p.requires_grad for p in read.parameters())
        tensor_unparallelize(model)
        assert not any(p.dtype == torch.uint8 for p in model.parameters())
        # The sums of a few layers, in another order.
        bound = 2**10 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=bound, atol=bound)
        assert model.generate(ids, max_new_tokens=4, do_sample=False).equal(tokens)

    folder = tmp_path / "floats"
    full.save_pretrained(folder)
    run_threads(2, body)
