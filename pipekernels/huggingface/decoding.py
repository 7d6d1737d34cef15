"""``generate`` with compiled decoder layers.

A step of greedy decoding multiplies a few rows: it takes the time of reading the weights, plus that
of Python between the products. transformers compiles this step on GPUs only, and as one program of
all layers, which takes minutes to make on a CPU. Here each decoder layer is a program, and layers
that are alike share one, as in *regional compilation* of torch's tutorials. Two things are not left
to the compiler, whose guards on a layer cost as much as all of its small operations:

* which layers are alike, and whether one has changed: :func:`_kind`, once per prompt;
* which keys and values in the cache are the layer's: it is handed a cache of its own, else its
  index would be a constant of the program.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.changes import set_attribute

_Programs = dict[tuple[Any, ...], Callable[..., Any]]


def compile_decoding(model: nn.Module, max_length: int | None = None) -> nn.Module:
    """Compile the decoder layers of a transformers model for ``generate`` on CPUs, and let
    ``generate`` keep keys and values in a static cache.

    A layer's program runs for one new token per sequence, without gradients; all else, such as the
    prompt, runs as before. The first token waits for the compiler, tens of seconds on a cold disk
    cache (``TORCHINDUCTOR_CACHE_DIR``); so does the first after a change of the layers. Tokens are
    those of the model as it was, up to rounding. Undone by
    :func:`~pipekernels.tensor_parallel.tensor_unparallelize`.

    Args:
        model: a transformers decoder, sharded or not. Every rank calls this.
        max_length: tokens, prompt included, that the cache has room for. A longer text, like
            another batch size, is compiled anew, once; each step attends to the whole cache.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` cannot be compiled by layers, or is on a GPU, where ``generate`` with
            ``cache_implementation="static"`` compiles by itself; or torch is older than 2.10.
        RuntimeError: of the compiler, while generating: a layer cannot be compiled by itself, or
            needs more of a cache than to add to it.
    """
    programs: _Programs = {}
    for layer in _decoder_layers(model):
        if not isinstance(layer.forward, _Step):
            set_attribute(layer, "forward", _Step(layer, programs))
    config: Any = model.generation_config
    config.cache_implementation = "static"
    config.max_cache_len = max_length
    config.disable_compile = True  # Of all layers as one program.
    return model


def _decoder_layers(model: Any) -> list[nn.Module]:
    name = type(model).__name__
    if not hasattr(model, "generation_config") or not model.can_generate():
        raise ValueError(
            f"compile_decoding takes a transformers model that generates; {name} does not"
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise ValueError(f"compile_decoding needs torch 2.10 or newer; this is {torch.__version__}")
    if model.device.type != "cpu":
        raise ValueError(
            f"compile_decoding is for CPUs, and the model is on {model.device}; there pass "
            'cache_implementation="static" to generate(), which compiles by itself'
        )
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = [
        module
        for module in model.get_decoder().modules()
        if isinstance(module, GradientCheckpointingLayer) and _index(module) is not None
    ]
    if model.config.is_encoder_decoder or not model._can_compile_fullgraph or not layers:
        raise ValueError(
            f"{name} cannot be compiled by layers: that takes a decoder alone, which transformers "
            "can compile with a static cache, and which has attention in each layer; generate() "
            "without compile_decoding"
        )
    return layers


def _index(layer: nn.Module) -> int | None:
    """Of the layer's keys and values in a cache."""
    found = (vars(module).get("layer_idx") for module in layer.modules())
    return next((index for index in found if index is not None), None)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """All that decides the program of a layer: two of one kind differ in the values of tensors."""
    kind: list[Any] = []
    for name, module in layer.named_modules():
        kind += name, type(module), tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            kind += key, tensor is None or (tensor.dtype, tensor.shape, tensor.stride())
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                kind += key, key != "layer_idx" and value
            elif isinstance(value, Communicator):
                kind += key, value.handle
            else:
                kind += key, getattr(value, "_attn_implementation", None)
    return tuple(kind)


def _program(layer: nn.Module) -> Callable[..., Any]:
    """The compiled ``forward`` of layers of one kind."""
    # Without the wrapper that all classes share, and with code of its own, since it is by the code
    # that the compiler finds programs.
    forward = getattr(type(layer).forward, "__wrapped__", type(layer).forward)
    copied = FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    options: Any = {"guard_filter_fn": _of_arguments, "size_asserts": False}
    return torch.compile(copied, fullgraph=True, options=options)


def _of_arguments(guards: Sequence[Any]) -> list[bool]:
    return [not re.search(r"\bself\b|\bG\[", guard.name) for guard in guards]


class _OwnCache:
    """What a layer of attention needs of a cache."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, keys: Tensor, values: Tensor, _: int, *args: Any, **kwargs: Any) -> Any:
        return self.layer.update(keys, values, *args, **kwargs)


class _Step:
    """The ``forward`` of a decoder layer: the program of its kind where that applies."""

    def __init__(self, layer: nn.Module, programs: _Programs) -> None:
        self._layer = layer
        self._eager = layer.forward
        self._index: Any = _index(layer)
        self._programs = programs
        self._program: Callable[..., Any] | None = None
        self._cache: Callable[[], Any] = lambda: None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        from transformers import Cache

        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, Cache)), None)
        if (
            x.shape[1] > 1
            or cache is None
            or not cache.is_compileable
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
        ):
            return self._eager(x, *args, **kwargs)
        if self._program is None or cache is not self._cache():
            self._cache = weakref.ref(cache)
            kind = _kind(self._layer)
            if kind not in self._programs:
                self._programs[kind] = _program(self._layer)
            self._program = self._programs[kind]
        own = _OwnCache(cache.layers[self._index])
        args = tuple(own if each is cache else each for each in args)
        kwargs = {name: own if each is cache else each for name, each in kwargs.items()}
        return self._program(self._layer, x, *args, **kwargs)
