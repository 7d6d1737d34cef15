"""The formats of compressed-tensors (``quant_method: compressed-tensors``) with integers.

``pack-quantized``: ``p`` elements in a word of int32, the lowest bits first: ``weight_packed``
``[n, k / p]``, ``weight_zero_point`` ``[n / p, groups]``; ``weight_shape`` are ``n`` and ``k``.
``int-quantized``: int8 ``weight`` ``[n, k]`` and ``weight_zero_point`` ``[n, groups]``. Both have
``weight_scale`` ``[n, groups]``, no zeros if symmetric, and perhaps ``weight_g_idx`` ``[k]``, the
group of each input feature. Scales of activations are ignored: layers round their input themselves.
"""

from pipekernels.huggingface.formats import base
from pipekernels.huggingface.sources import Computed


def compressed(name: str, tensors: base.Tensors, config: base.Config) -> base.QuantizedIntegers:
    """The weight of a linear layer."""
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
    bits, part = 8, "weight_packed" if "weight_packed" in tensors else "weight"
    weight, symmetric = tensors[part], zero is None
    found = f"is {weight.dtype} of the shape {weight.shape}"
    if config.get("transform_config"):
        raise base.refusal(f"{name}.{part}", "has a transform_config, which rotates it")
    if part == "weight_packed":
        shape: list[int] = tensors["weight_shape"][...].tolist()
        bits = {-(-shape[1] * bits // 32): bits for bits in (8, 4)}.get(weight.shape[1], 0)
        if bits == 0 or weight.dtype != "I32":
            raise base.refusal(f"{name}.{part}", f"{found}, not 8 or 4 bits of {shape} in I32")
        weight = Computed(shape, base.unpacked(weight, bits, 1).read)
        zero = None if zero is None else base.unpacked(zero, bits, 0)
    elif weight.dtype != "I8":
        raise base.refusal(f"{name}.{part}", f"{found}, not I8")
    group, index = weight.shape[1] // (*scale.shape, 1, 1)[1], tensors.get("weight_g_idx")
    return base.QuantizedIntegers(name, bits, group, weight, scale, zero, symmetric, index)
