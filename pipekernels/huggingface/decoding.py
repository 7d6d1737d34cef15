"""``generate`` with compiled decoder layers.

A step of greedy decoding multiplies a few rows: it takes as long as reading the weights, plus the
time of Python between the products. transformers compiles this step on GPUs only, and as one
program of all layers, which takes minutes on a CPU. Here each decoder layer is a program, and equal
layers share one, as in *regional compilation* of torch's tutorials.

The compiler alone decides which program fits a layer, by all of its guards. Guards take as long as
a layer's small operations. So they run for each layer at the first token of a call of ``generate``,
and the later tokens of this call replay the programs. Between calls the layers are not compiled.

Each layer gets its own cache, since its index in a shared one would be a constant of the program.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipekernels._torch_private import (
    accepted_program,
    current_compilation,
    dispatch_mode_count,
    guarding_hooks,
    has_global_hooks,
    inductor,
    refusals,
    vary_size,
)
from pipekernels.huggingface.decoder_graph import Memory, decompose_attention, join_products
from pipekernels.tensor_parallel.full_layer import set_attribute

_log = logging.getLogger(__name__)
_KEYS = 64  # Attention is over a multiple of so many keys.
_PROGRAMS = 64  # The most that layers of a model have: kinds of layers times sizes of batches.
_MODES = "greedy_search", "sample", "beam_search", "beam_sample"


def compile_decoding(model: nn.Module, max_length: int | None = None) -> nn.Module:
    """Compile the decoder layers of a transformers model for ``generate`` on CPUs, which then keeps
    keys and values in a static cache.

    The compiled layers process one new token per sequence, without gradients; everything else,
    such as the prompt, runs as before. The first token waits for the compiler, tens of seconds on a
    cold disk cache (``TORCHINDUCTOR_CACHE_DIR``), and so does the first token after layers change.
    Tokens equal the uncompiled model's, up to rounding. The next call of ``generate`` sees changes
    of the model. Calls whose layers cannot be compiled run as before: the log says
    why.

    A call that is given a cache, or ``cache_implementation``, runs as before, too.
    :func:`~pipekernels.tensor_parallel.tensor_unparallelize` undoes this.

    Args:
        model: a transformers decoder, sharded or not. Every rank calls this.
        max_length: tokens, prompt included, that fit into the cache. A longer text, or another
            batch size, compiles once more. Each step attends to the keys so far.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` cannot be compiled layer by layer, or is on a GPU, where ``generate``
            compiles by itself with ``cache_implementation="static"``; or torch is older than 2.10.
        RuntimeError: while generating: the compiler fails, as without a C++ compiler.
    """
    _check(model)
    generating: Any = model
    generate = vars(model).get("generate")
    before = generate.generate if isinstance(generate, _Generate) else generating.generate
    set_attribute(model, "generate", _Generate(model, before, max_length))
    Memory(generating.get_output_embeddings() or nn.Module()).join([])
    return model


def _check(model: Any) -> None:
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
    can_compile = model._can_compile_fullgraph and not model.config.is_encoder_decoder
    if not can_compile or not _decoder_layers(model):
        raise ValueError(
            f"{name} cannot be compiled by layers: that takes a decoder alone, which transformers "
            "can compile with a static cache; generate() without compile_decoding"
        )


def _decoder_layers(model: Any) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = model.get_decoder().modules()
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


class _Generate:
    """``generate`` of a model, which replaces the ``forward`` of decoder layers while it runs."""

    def __init__(self, model: Any, generate: Callable[..., Any], max_length: int | None) -> None:
        self.generate = generate
        self._model = model
        self._max_length = max_length
        self._length = max_length or 0  # Of the last cache.
        self._programs = _Programs()
        self._memories: dict[nn.Module, Memory] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Generate, (self._model, self.generate, self._max_length)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, memories = self._model, self._memories
        # A layer whose forward was replaced already, by the user or another thread, keeps it.
        layers = [layer for layer in _decoder_layers(model) if "forward" not in vars(layer)]
        self._memories = {layer: memories.get(layer) or Memory(layer) for layer in layers}
        is_custom = kwargs.get("custom_generate") is not None
        if is_custom or not layers or model.device.type != "cpu":
            return self.generate(*args, **kwargs)
        call = _Call()
        prepare = partial(self._prepare_cache, call)
        replaced: list[Any] = [(model, "_prepare_cache_for_generation", prepare)]
        for layer, memory in self._memories.items():
            replaced.append((layer, "forward", _Step(call, self._programs, memory)))
        try:
            for module, name, value in replaced:
                vars(module)[name] = value
            output = self.generate(*args, **kwargs)
        finally:
            for module, name, value in replaced:
                if vars(module).get(name) is value:
                    del vars(module)[name]
        if call.cache is not None and getattr(output, "past_key_values", None) is call.cache:
            output.past_key_values = _growing(call.cache, model.config)
        return output

    def _prepare_cache(
        self, call: _Call, config: Any, inputs: dict[str, Any], mode: Any, batch: int, length: int
    ) -> None:
        """Replace the growing cache of ``generate`` by a static one."""
        from transformers import DynamicCache, StaticCache
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        model, key = self._model, "past_key_values"
        is_given = inputs.get(key) is not None or config.cache_implementation is not None
        type(model)._prepare_cache_for_generation(model, config, inputs, mode, batch, length)
        if is_given or mode.value not in _MODES or type(inputs.get(key)) is not DynamicCache:
            return
        self._length = max(self._length, length)
        cache = StaticCache(model.config, self._length)
        if all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in cache.layers):
            call.cache = inputs[key] = cache


def _growing(static: Any, config: Any) -> Any:
    """The cache that ``generate`` returns by itself, with the content of a static one."""
    from transformers import DynamicCache

    result: Any = DynamicCache(config=config.get_text_config(decoder=True))
    for layer, full in zip(result.layers, static.layers, strict=True):
        length = int(full.get_seq_length())
        if length:
            layer.update(full.keys[:, :, :length], full.values[:, :, :length])
            if layer.is_sliding:
                layer.cumulative_length = length
    return result


class _Call:
    """What the layers share during a call of ``generate``."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.is_eager = False
        self._masks: tuple[Any, Any] = None, None

    def masks(self, layer: Any, values: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        """The mask of all keys of a layer of the cache, among ``values``, and its part for those
        that are there, with this token's: a multiple of :data:`_KEYS`, which one program takes.
        None, if another tensor (Bloom's biases) has a value for each key, too."""
        length = layer.max_cache_len
        whole = [x for x in values if isinstance(x, Tensor) and x.shape[-1:] == (length,)]
        if layer.is_sliding or [x.dim() for x in whole] != [4]:
            return None, None
        end = min(length, (int(layer.get_seq_length()) // _KEYS + 1) * _KEYS)
        if whole[0] is not self._masks[0] or end != self._masks[1].shape[-1]:
            part = whole[0][..., :end]
            vary_size(part, 3)
            self._masks = whole[0], part
        return self._masks

    def empty(self) -> set[int]:
        """The layers of the cache that the first pass has not reached yet."""
        layers = () if self.cache is None else self.cache.layers
        return {index for index, layer in enumerate(layers) if not layer.is_initialized}


class _OwnCache:
    """The part of a cache that one attention layer needs, as long as its mask.

    Attributes:
        mask: of the keys that are attended to; None: of all.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.mask: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, _: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = self.layer.update(keys, values, *args, **kwargs)
        if self.mask is None:
            return keys, values
        length = self.mask.shape[-1]
        return keys[:, :, :length], values[:, :, :length]


_CONSTANTS = bool, int, float, str, torch.dtype, torch.device, type(None), _OwnCache


class _Step:
    """The ``forward`` of a decoder layer during a call of ``generate``: its compiled program where
    that applies."""

    def __init__(self, call: _Call, programs: _Programs, memory: Memory) -> None:
        self._call = call
        self._programs = programs
        self._memory = memory
        self._indices: set[int] = set()  # In the cache.
        self._own: _OwnCache | None = None
        self._replays: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._is_step(*args, *kwargs.values()):
            return self._run_eagerly(args, kwargs)
        cache = self._call.cache
        own = self._own = self._own or _OwnCache(cache.layers[next(iter(self._indices))])
        mask, own.mask = self._call.masks(own.layer, [*args, *kwargs.values()])
        replaced: dict[int, Any] = {id(cache): own} | ({} if mask is None else {id(mask): own.mask})
        own_args = tuple(replaced.get(id(value), value) for value in args)
        own_kwargs = {key: replaced.get(id(value), value) for key, value in kwargs.items()}
        arguments = self._memory.layer, own_args, own_kwargs
        likeness = _likeness((*own_args, *own_kwargs, *own_kwargs.values()))
        program = self._replays.get(likeness)
        if program is None:
            program, can_replay = self._programs.find(*arguments)
            if can_replay:
                self._replays[likeness] = program
        try:
            self._programs.thread.memory = self._memory
            return program(*arguments)
        except refusals() as error:
            _log.info("a call of generate() is not compiled: %s", str(error).partition("\n")[0])
            self._call.is_eager = True
            return self._run_eagerly(args, kwargs)

    def _is_step(self, x: Tensor, *values: Any) -> bool:
        """Whether the layer processes one new token per sequence, at a known place of the cache."""
        call = self._call
        return (
            x.shape[1] == 1
            and any(value is call.cache for value in values)
            and not call.is_eager
            and len(self._indices) == 1
            and (bool(self._replays) or not call.empty())
            and not torch.is_grad_enabled()
            and dispatch_mode_count() == 0
            and not has_global_hooks()
        )

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        empty = self._call.empty()
        output = _forward(self._memory.layer, args, kwargs)
        self._indices |= empty - self._call.empty()
        return output


def _forward(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _likeness(value: Any) -> Any:
    """Equal for two values that a program treats alike."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple):
        return tuple(map(_likeness, value))
    return (type(value), value) if isinstance(value, _CONSTANTS) else object()


class _Programs:
    """What the compiler has made of the decoder layers of a model."""

    def __init__(self) -> None:
        # The compiler keeps programs by the code of a function, and by its name which sizes vary.
        code = _forward.__code__.replace(co_name=f"_forward_{id(self)}")
        self._function = FunctionType(code, globals())
        self._compiled = torch.compile(self._function, fullgraph=True, backend=self._backend)
        self._changing: set[Any] = set()  # Programs that change what their guards look at.
        self.thread = threading.local()

    def find(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Callable[..., Any], bool]:
        """The program whose guards hold, and whether they then stay so; else the compiler."""
        arguments = {"layer": layer, "args": args, "kwargs": kwargs}
        found = accepted_program(self._function, arguments)
        return found and (found[0], found[1] not in self._changing) or (self._compile, False)

    def _compile(self, *arguments: Any) -> Any:
        with guarding_hooks(recompile_limit=_PROGRAMS):
            return self._compiled(*arguments)

    def _backend(self, graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        number, changes = current_compilation()
        (self._changing.add if changes else self._changing.discard)(number)
        decompose_attention(graph.graph)
        groups = join_products(graph.graph, inputs)
        graph.recompile()
        code = inductor(graph, inputs, {"size_asserts": False})

        def run(*given: Any) -> Any:
            joined = self.thread.memory.join([[given[i] for i in group] for group in groups])
            inputs = list(given)
            for group, tensor in zip(groups, joined, strict=True):
                inputs[group[0]] = tensor
            return code(*inputs)

        return run
