"""Checkpoints whose weights are quantized, a file for each format; CONTRIBUTING.md says what a new
one touches."""

from collections.abc import Mapping
from typing import Any

from pipekernels.huggingface.formats.awq import awq
from pipekernels.huggingface.formats.base import Config, QuantizedIntegers, refusal
from pipekernels.huggingface.formats.compressed_tensors import compressed
from pipekernels.huggingface.formats.fp8 import fp8
from pipekernels.huggingface.formats.gptq import gptq
from pipekernels.huggingface.sources import Source

__all__ = ["QuantizedIntegers", "with_weights"]

# By quant_method: the format, and tensors that tell that a module has it.
_FORMATS: dict[Any, tuple[Any, set[str]]] = {
    "gptq": (gptq, {"qweight"}),
    "awq": (awq, {"qweight"}),
    "compressed-tensors": (compressed, {"weight_packed", "weight_scale"}),
    "fp8": (fp8, {"weight_scale_inv"}),
}


class _Parts(dict[str, Source]):
    """The tensors of a module, by the last part of their names."""

    name = ""

    def __missing__(self, part: str) -> Source:
        found = ", ".join(sorted(self))
        raise refusal(f"{self.name}.{part}", f"is missing beside {found}: copy all files")


def with_weights(files: Mapping[str, Source], config: Config) -> dict[str, Source]:
    """``files`` with one source in the place of the tensors of each quantized weight. ValueError
    for what no format reads, and if a tensor is missing."""
    method = config.get("quant_method")
    if method not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise refusal("quantization_config", f"has quant_method={method!r}, not {known}")
    form, markers = _FORMATS[method]
    modules: dict[str, _Parts] = {}
    for key, source in files.items():
        module, _, part = key.rpartition(".")
        modules.setdefault(module, _Parts())[part] = source
    result: dict[str, Source] = {}
    for module, parts in modules.items():
        parts.name = module
        if markers & parts.keys():
            weight = form(module, parts, config)
            for part in parts.keys() - {"bias"}:
                del parts[part]
            parts["weight"] = weight
        result |= {f"{module}.{part}" if module else part: each for part, each in parts.items()}
    return result
