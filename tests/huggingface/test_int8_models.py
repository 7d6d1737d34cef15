"""Sharded models of transformers with weights of int8 generate as their dequantized weights do."""

import copy
from pathlib import Path

import pytest
import torch
from support.ranks import run_threads

transformers = pytest.importorskip("transformers")

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface import load_pretrained
from pipekernels.huggingface.derive.small_models import small_model
from pipekernels.tensor_parallel import quantize_weights, tensor_unparallelize
from pipekernels.tensor_parallel.int8 import Int8Experts, Int8Linear

FAMILIES = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, Int8Linear),
    "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, Int8Linear),
    "Mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, Int8Experts),
    "GptOss": (transformers.GptOssForCausalLM, transformers.GptOssConfig, Int8Experts),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_those_of_the_dequantized_model(family: str, tmp_path: Path) -> None:
    kind, config, expected_class = FAMILIES[family]
    full = small_model(kind, config())[0].float()
    ids = torch.randint(3, 61, (1, 7))

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copy.deepcopy(full), "auto", comm)
        quantize_weights(model)
        assert any(isinstance(module, expected_class) for module in model.modules())
        logits = model(input_ids=ids).logits
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
        with pytest.raises(TypeError, match="has int8 weights, which transformers' files do not"):
            model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="they lack '.*scale'"):
            load_pretrained(model, folder)
        tensor_unparallelize(model)
        assert not any(p.dtype == torch.int8 for p in model.parameters())
        # The sums of a few layers, in another order.
        bound = 2**10 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=bound, atol=bound)
        assert model.generate(ids, max_new_tokens=4, do_sample=False).equal(tokens)

    folder = tmp_path / "floats"
    full.save_pretrained(folder)
    run_threads(2, body)
