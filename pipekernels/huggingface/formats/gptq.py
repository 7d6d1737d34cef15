"""GPTQ (``quant_method: gptq``), as AutoGPTQ and GPTQModel write it.

``p`` elements in a word of int32, the lowest bits first: ``qweight`` ``[k / p, n]``, ``qzeros``
``[groups, n / p]``, ``scales`` ``[groups, n]``, and ``g_idx`` ``[k]``, the group of each input
feature, in any order with ``desc_act`` ("act-order"). Version 1 (``checkpoint_format: gptq``) has
zeros - 1. With ``sym`` all zeros are the middle.
"""

from pipekernels.huggingface.formats import base


def gptq(name: str, tensors: base.Tensors, config: base.Config) -> base.QuantizedIntegers:
    """The weight of a linear layer."""
    bits, version = config.get("bits"), config.get("checkpoint_format", "gptq")
    if bits not in (8, 4) or version not in ("gptq", "gptq_v2"):
        found = f"has bits={bits!r} and checkpoint_format={version!r}"
        raise base.refusal(f"{name}.qweight", f"{found}, not 8 or 4 and gptq or gptq_v2")
    weight = base.unpacked(tensors["qweight"], bits, 0).t()
    zero = base.unpacked(tensors["qzeros"], bits, 1, added=int(version == "gptq")).t()
    return base.QuantizedIntegers(
        name,
        bits,
        config.get("group_size") or -1,
        weight,
        tensors["scales"].t(),
        zero,
        symmetric=config.get("sym", False),
        index=tensors["g_idx"] if config.get("desc_act") else None,
    )
