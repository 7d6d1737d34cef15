"""AWQ (``quant_method: awq``), as AutoAWQ writes it for its kernel "gemm".

8 elements in a word of int32, in the order 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first:
``qweight`` ``[k, n / 8]``, ``qzeros`` ``[groups, n / 8]``; ``scales`` ``[groups, n]``.
"""

from pipekernels.huggingface.formats import base

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def awq(name: str, tensors: base.Tensors, config: base.Config) -> base.QuantizedIntegers:
    """The weight of a linear layer."""
    bits, version = config.get("bits", config.get("w_bit")), config.get("version", "gemm")
    if bits != 4 or version.lower() != "gemm":
        found = f"has bits={bits!r} and version={version!r}"
        raise base.refusal(f"{name}.qweight", f"{found}, not 4 and gemm")
    group = config.get("group_size", config.get("q_group_size", -1))
    weight, zero = (
        base.unpacked(tensors[part], 4, 1, _PLACES).t() for part in ("qweight", "qzeros")
    )
    scale = tensors["scales"].t()
    return base.QuantizedIntegers(name, 4, group, weight, scale, zero, symmetric=False)
